"""Cut a graph into pieces that run one after the other and hand on values still needed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from tightfit.capture.nodes import is_getitem


@dataclass(frozen=True)
class Piece:
    module: fx.GraphModule  # its operators; placeholders and outputs by the names below
    inputs: tuple[str, ...]  # names of its inputs: nodes of the whole graph
    outputs: tuple[str, ...]  # names of values it makes that are read later or returned


def cut(module: fx.GraphModule, groups: Sequence[Sequence[fx.Node]]) -> list[Piece]:
    """Cut a graph behind the last result of each group.

    `groups`: results in the order in which they are to be finished; operators behind the last
    are left out. Returns a piece for each group, in order.
    """
    nodes = list(module.graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    ends: list[int] = []
    for group in groups:
        last = max((place[node] for node in group), default=-1)
        ends.append(max(last, ends[-1] if ends else -1))
    wanted = {node for group in groups for node in group}
    piece_of: dict[fx.Node, int] = {}
    for node, index in place.items():  # a node that picks an output of a tuple stays with the maker
        picked = piece_of[node.all_input_nodes[0]] if is_getitem(node) else None
        piece_of[node] = bisect_left(ends, index) if picked is None else picked
    computed = [node for node in nodes if node.op == "call_function"]
    return [
        _piece(module, [node for node in computed if piece_of[node] == number], wanted)
        for number in range(len(groups))
    ]


def _piece(module: fx.GraphModule, inside: list[fx.Node], wanted: set[fx.Node]) -> Piece:
    members = set(inside)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    constants = {n for node in inside for n in node.all_input_nodes if n.op == "get_attr"}
    read = dict.fromkeys(n for node in inside for n in node.all_input_nodes)
    inputs = [n for n in read if n not in members and n not in constants]
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in (*constants, *inside):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    leaving = (n for n in inside if any(u not in members and u.op != "output" for u in n.users))
    kept = wanted.union(leaving)
    outputs = [node for node in inside if node in kept]
    graph.output([copies[node] for node in outputs])
    return Piece(
        fx.GraphModule(module, graph),
        tuple(node.name for node in inputs),
        tuple(node.name for node in outputs),
    )
