"""A graph with its ops in another order, and its plans in the graph's own ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from tightfit.graph.ir import Choice, Graph, OpId
from tightfit.plan.assemble import Step
from tightfit.plan.plan import Compute

AnyStep = TypeVar("AnyStep", Compute, Step)


def reorder(graph: Graph, order: Sequence[OpId]) -> Graph:
    """Return the graph with its ops in another valid order; ids are positions again."""
    place = {op: position for position, op in enumerate(order)}
    ops = tuple(  # a partner only names an op to people, and must be an earlier one
        msgspec.structs.replace(graph.ops[op], id=position, partner=None)
        for position, op in enumerate(order)
    )
    return msgspec.structs.replace(graph, ops=ops, choices=moved_choices(graph, place))


def moved_choices(graph: Graph, place: Mapping[OpId, OpId]) -> tuple[Choice, ...]:
    """Return the linked alternatives of a graph whose ops get other ids."""
    return tuple(
        Choice(
            branches=tuple(
                tuple((place[op], way) for op, way in branch) for branch in choice.branches
            )
        )
        for choice in graph.choices
    )


def in_traced_order(steps: Sequence[AnyStep], order: Sequence[OpId]) -> list[AnyStep]:
    """Return the steps of a reordered graph with the ids of the graph itself."""
    return [
        msgspec.structs.replace(step, op=order[step.op]) if isinstance(step, Compute) else step
        for step in steps
    ]
