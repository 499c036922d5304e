"""Read graph files of the planning study (format in their folder's README.md) into graphs."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.graph import Alternative, Graph, Op, Segment, Value, Variant, validate_graph

__all__ = ["GraphFile", "read_graph_file", "read_graph_folder"]

MICROSECOND = 1e-6


@dataclass(frozen=True)
class GraphFile:
    """A graph, the peak in bytes that its budget ratios refer to, and bytes that are constant."""

    graph: Graph
    peak_bytes: int
    reference_cost_s: float | None = None
    constant_bytes: int = 0


def read_graph_folder(folder: Path, costs: str = "p100") -> dict[str, GraphFile]:
    """Return the graphs of a folder by name, smallest first."""
    files = [read_graph_file(path, costs) for path in sorted(folder.glob("*.json.gz"))]
    return {file.graph.name: file for file in sorted(files, key=lambda file: len(file.graph.ops))}


def read_graph_file(path: Path, costs: str = "p100") -> GraphFile:
    """Read one file; `costs` names the device whose roofline costs are used."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    if "reference_peak" in data:
        return _with_alternatives(data)
    values: list[Value] = []
    storages: dict[int, int] = {}
    for node in data["nodes"]:
        storages[node["id"]] = len(values)
        values.append(Value(id=len(values), name=node["name"], size_bytes=node["bytes"]))
    ops = tuple(
        Op(
            id=node["id"],
            target=node["op"],
            segment=int(node["phase"] == "bwd"),
            flops=int(node["flops"]),
            alternatives=(
                Alternative(
                    reads=tuple(storages[d] for d in dict.fromkeys(node["deps"])),
                    writes=(storages[node["id"]],),
                    variants=(Variant(cost_s=node["cost"][costs] * MICROSECOND),),
                ),
            ),
        )
        for node in data["nodes"]
    )
    return GraphFile(
        _graph(data["name"], values, ops, f"roofline:{costs}"),
        data["peak"],
        constant_bytes=sum(data["const_bytes"].values()),
    )


def _graph(
    name: str, values: list[Value], ops: tuple[Op, ...], source: str, *, one_segment: bool = False
) -> Graph:
    """In one segment a mask may be made at any time; in two only in the forward pass."""
    segments = (Segment(id=0, phase="forward"), Segment(id=1, phase="backward"))
    if one_segment:
        segments = segments[:1]
    return validate_graph(
        Graph(name=name, values=tuple(values), ops=ops, segments=segments, cost_source=source)
    )


def _with_alternatives(data: dict[str, Any]) -> GraphFile:
    nodes = data["nodes"]
    values = [Value(id=n["id"], name=n["op"], size_bytes=n["bytes"]) for n in nodes]
    ops = tuple(
        Op(
            id=node["id"],
            target=node["op"],
            required=node["required"],
            pinned=None if node["recomputable"] else "not recomputable in the file",
            alternatives=tuple(_alternatives(node)),
        )
        for node in nodes
    )
    graph = _graph(data["name"], values, ops, "roofline:p100", one_segment=True)
    return GraphFile(graph, data["reference_peak"], data["reference_cost_us"] * MICROSECOND)


def _alternatives(node: dict[str, Any]) -> list[Alternative]:
    """Each alternative of the file; one that may run in place gives two."""
    found: list[Alternative] = []
    for number, entry in enumerate(node["alternatives"]):
        name = "default" if number == 0 else f"alternative{number}"
        variants = tuple(
            Variant(cost_s=v["cost_us"] * MICROSECOND, workspace_bytes=v["workspace_bytes"])
            for v in entry["variants"]
        )
        plain = Alternative(
            name=name,
            reads=tuple(dict.fromkeys(entry["reads"])),
            writes=(node["id"],),
            variants=variants,
        )
        found.append(plain)
        if entry["overwrites"] is not None:
            found.append(
                Alternative(
                    name=f"{name}.in_place",
                    reads=plain.reads,
                    writes=plain.writes,
                    variants=variants,
                    overwrites=entry["overwrites"],
                )
            )
    return found
