"""A graph that Dynamo has handed over as a record for a file, and the graph of such a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from torch import fx, nn

from tightfit.capture.handed import HandedGraph
from tightfit.capture.recall.values import NotKept, packed, unpacked
from tightfit.torch_private import traces


class KeptHandedGraph(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # The kind of each, its name, its function, and packed arguments
    nodes: list[tuple[str, str, str, Any, Any]]
    made_in: dict[str, str]  # the module in whose forward a node was made
    # Outputs that the callable returns along with a loss
    returned_with_loss: list[int] = msgspec.field(name="beside_loss")
    returned_inputs: dict[int, int]  # which input an output is


def kept_graph(graph: HandedGraph, modules: Mapping[str, nn.Module]) -> KeptHandedGraph:
    """Return the record of a graph.

    Raises `NotKept` if it is not all of its callable, or holds something that only this process
    has.
    """
    if graph.reason or graph.numbers or graph.calls_opaque:
        raise NotKept("a graph that ends in a break, takes numbers, or calls modules")
    places = {node: i for i, node in enumerate(graph.module.graph.nodes)}
    names = {id(module): name for name, module in modules.items()}
    return KeptHandedGraph(
        nodes=[
            (n.op, n.name, _called(n), packed(n.args, places), packed(n.kwargs, places))
            for n in places
        ],
        made_in={n.name: names[made] for n, made in graph.modules.items() if made in names},
        returned_with_loss=sorted(graph.returned_with_loss),
        returned_inputs=dict(graph.returned_inputs),
    )


def _called(node: fx.Node) -> str:
    if node.op in ("placeholder", "output", "call_method"):
        return str(node.target)
    name = traces.name_of_function(node.target) if node.op == "call_function" else None
    if name is None or (name.startswith(_OPERATORS) and not name.startswith(_OF_PYTORCH)):
        raise NotKept(f"{node.target}, which is neither PyTorch's nor Python's function")
    return name


_OPERATORS = "torch.ops."
_OF_PYTORCH = ("torch.ops.aten.", "torch.ops.prims.")


def graph_again(kept: KeptHandedGraph, modules: Mapping[str, nn.Module]) -> HandedGraph:
    """Return the graph of a record.

    Raises `NotKept` if it names an object that does not exist.
    """
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for op, name, called, args, kwargs in kept.nodes:
        target = traces.function_named(called) if op == "call_function" else called
        node = graph.create_node(op, target, unpacked(args, nodes), unpacked(kwargs, nodes), name)
        if target is None or node.name != name:
            raise NotKept(f"{called}, which is not there")
        nodes.append(node)
    made_in = {n: id(modules[kept.made_in[n.name]]) for n in nodes if n.name in kept.made_in}
    return HandedGraph(
        traces.lazy_module(nn.Module(), graph),
        modules=made_in,
        returned_with_loss=frozenset(kept.returned_with_loss),
        returned_inputs=kept.returned_inputs,
    )
