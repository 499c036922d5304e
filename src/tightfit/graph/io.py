"""Graph files: strict, versioned JSON, described in ``docs/graph-format.md``."""

from __future__ import annotations

from pathlib import Path

from tightfit.errors import InvalidGraph
from tightfit.files import decode_record, encode_record, read_limited, write_atomically
from tightfit.graph.ir import FORMAT, Graph
from tightfit.graph.validate import validate_graph


def graph_to_json(graph: Graph) -> bytes:
    """Return a graph as JSON text; equal graphs give equal bytes."""
    return encode_record(graph)


def graph_from_json(content: bytes, *, source: str = "the graph") -> Graph:
    """Return the valid graph a JSON text describes.

    `source`: where the text comes from; named in errors. Raises `BadInput` if the text is no graph
    of a format this version reads. Raises `InvalidGraph` if the graph breaks a rule of
    `validate_graph`.
    """
    graph = decode_record(content, Graph, source=source, newest=FORMAT)
    try:
        return validate_graph(graph)
    except InvalidGraph as error:
        raise InvalidGraph(f"{source}: {error}") from error


def load_graph(path: Path | str) -> Graph:
    """Return the valid graph in a ``.json`` or ``.json.gz`` file.

    Raises `BadInput` or `InvalidGraph` if the file cannot be read, is no graph, or is a graph that
    breaks a rule.
    """
    return graph_from_json(read_limited(path), source=str(path))


def save_graph(graph: Graph, path: Path | str) -> None:
    """Write a graph to a ``.json`` or ``.json.gz`` file, all or nothing."""
    write_atomically(path, graph_to_json(validate_graph(graph)))
