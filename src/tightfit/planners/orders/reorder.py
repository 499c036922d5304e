"""A graph with its ops in another order, and its plans in the graph's own ids."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tightfit.graph.ir import Choice, Graph, OpId
from tightfit.plan.plan import Compute


def reorder(graph: Graph, order: Sequence[OpId]) -> Graph:
    """Return the graph with its ops in another valid order; ids are positions again."""
    place = {op: position for position, op in enumerate(order)}
    ops = tuple(
        msgspec.structs.replace(
            graph.ops[op],
            id=position,
            partner=None,  # only names it to people, and must be an earlier op
        )
        for position, op in enumerate(order)
    )
    choices = tuple(
        Choice(
            branches=tuple(
                tuple((place[op], way) for op, way in branch) for branch in choice.branches
            )
        )
        for choice in graph.choices
    )
    return msgspec.structs.replace(graph, ops=ops, choices=choices)


def in_traced_order(computes: Sequence[Compute], order: Sequence[OpId]) -> list[Compute]:
    """Return the computes of a reordered graph with the ids of the graph itself."""
    return [msgspec.structs.replace(step, op=order[step.op]) for step in computes]
