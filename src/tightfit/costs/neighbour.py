"""Costs of a step, scaled from the same step on inputs of another shape.

A new length of input need not wait for measurements: every op's cost scales from its neighbour's
by its operations, or by the bytes it moves where it counts none.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from tightfit.costs.variants import traffic_bytes
from tightfit.graph.ir import Alternative, Graph, Op, OpId

_SCALED = ", scaled from another shape"


def matched(graph: Graph, neighbour: Graph) -> dict[OpId, Op]:
    """Return for the ops of a graph their likes in another: the same operator of the same module.

    Ops without a like, or with other alternatives, are left out.
    """
    known = dict(zip(_places(neighbour), neighbour.ops, strict=True))
    found: dict[OpId, Op] = {}
    for place, op in zip(_places(graph), graph.ops, strict=True):
        like = known.get(place)
        if like is not None and _names(like) == _names(op):
            found[op.id] = like
    return found


def _places(graph: Graph) -> list[tuple[str, str, int]]:
    """Return operator, module and how many of both came before, for every op."""
    seen: Counter[tuple[str, str]] = Counter()
    places: list[tuple[str, str, int]] = []
    for op in graph.ops:
        kind = (op.target, op.module)
        places.append((*kind, seen[kind]))
        seen[kind] += 1
    return places


def _names(op: Op) -> list[str]:
    return [alternative.name for alternative in op.alternatives]


def scaled_from(graph: Graph, neighbour: Graph) -> Graph:
    """Return the graph with the costs of matched ops scaled from a neighbour's; workspaces stay.

    `graph`: ops without a like keep their costs.
    """
    ops = list(graph.ops)
    for place, like in matched(graph, neighbour).items():
        op = ops[place]
        scaled = tuple(
            _scaled(alternative, known, work(graph, op, alternative), work(neighbour, like, known))
            for alternative, known in zip(op.alternatives, like.alternatives, strict=True)
        )
        ops[place] = msgspec.structs.replace(op, alternatives=scaled)
    source = f"{neighbour.cost_source.removesuffix(_SCALED)}{_SCALED}"
    return msgspec.structs.replace(graph, ops=tuple(ops), cost_source=source)


def _scaled(
    alternative: Alternative, known: Alternative, own_work: int, known_work: int
) -> Alternative:
    scale = own_work / max(1, known_work)
    cost_s = known.least_cost_s * scale
    variants = tuple(msgspec.structs.replace(v, cost_s=cost_s) for v in alternative.variants)
    return msgspec.structs.replace(alternative, variants=variants)


def work(graph: Graph, op: Op, alternative: Alternative) -> int:
    """Return a number that the cost of an op grows with: its operations, or bytes it moves."""
    return op.flops_of(alternative) or traffic_bytes(graph, op, alternative)
