"""The best possible on a recorded program: the default planner's plan, which knows all of it.

An online policy does not know the future. Its decisions are measured against the plan of the same
program.
"""

from __future__ import annotations

from tightfit.eviction.log.resolve import Event, Log
from tightfit.eviction.log.views import without_views
from tightfit.graph.ir import Alternative, Graph, Op, Value, Variant
from tightfit.graph.validate import validate_graph
from tightfit.plan.plan import Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.registry import plan_with
from tightfit.progress import SILENT, Progress

CLAIRVOYANT = "clairvoyant"
"""Its name in the list of policies."""

_NS = 1e-9


def clairvoyant(
    log: Log, budget_bytes: int, limits: Limits, progress: Progress = SILENT
) -> Outcome:
    """Return the default planner's plan for a recorded program in a budget."""
    task = Task(graph=graph_of(log), budget_bytes=budget_bytes)
    return plan_with("anytime", task, limits, progress)


def slowdown_of(log: Log, overhead: float) -> float:
    """Return a plan's cost as a multiple of the program's own, of which views are a part."""
    computed_ns = sum(log.operators[n].cost_ns for n in _computed(without_views(log)))
    return (1.0 + overhead) * computed_ns / log.base_cost_ns


def graph_of(log: Log) -> Graph:
    """Return a recorded program as the graph of a step.

    Views belong to their storages and cost nothing. Values that the program holds at its end are
    kept by the caller from their first computation on, which a policy need not do.
    """
    plain = without_views(log)
    constants = {
        plain.tensors[tensor].storage
        for event, number in plain.occurrences
        if event is Event.CONSTANT
        for tensor in plain.operators[number].outputs
    }
    held = {plain.tensors[tensor].storage for tensor in plain.held}
    values = tuple(
        Value(
            id=number,
            name=plain.tensors[storage.root].name,
            size_bytes=storage.size_bytes,
            role="input" if number in constants else "computed",
            fate="returned" if number in held else "none",
        )
        for number, storage in enumerate(plain.storages)
    )
    ops = tuple(
        Op(
            id=position,
            target=plain.operators[number].name,
            alternatives=(
                Alternative(
                    reads=_storages(plain, plain.operators[number].arguments),
                    writes=_storages(plain, plain.operators[number].outputs),
                    variants=(Variant(cost_s=plain.operators[number].cost_ns * _NS),),
                ),
            ),
        )
        for position, number in enumerate(_computed(plain))
    )
    return validate_graph(
        Graph(
            values=values,
            ops=ops,
            constants_bytes={"inputs": plain.constant_bytes},
            cost_source="recorded",
            name="recorded program",
        )
    )


def _computed(log: Log) -> list[int]:
    return [number for event, number in log.occurrences if event is Event.COMPUTE]


def _storages(log: Log, tensors: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(log.tensors[tensor].storage for tensor in tensors))
