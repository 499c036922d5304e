"""Plans of other methods as schedules of the engine: seeds of the search."""

from __future__ import annotations

from collections.abc import Sequence

from tightfit.graph.ir import Graph, OpId
from tightfit.plan.plan import Compute
from tightfit.planners.engine.problem import EngineProblem


def borrowed_ranges(
    problem: EngineProblem, graph: Graph, computes: Sequence[Compute]
) -> list[tuple[int, int, int]]:
    """Return how long values are resident in a plan, as the engine takes it.

    `problem`: of the same graph, with default alternatives only. `computes`: every op once in the
    order of the graph, and any recomputation. Returns list of (value, first stage, last stage): in
    the engine's numbers, one entry per lifetime that reaches the start of a later stage.
    """
    stages = _stages(problem, computes)
    made: dict[int, int] = {}  # value -> stage in which it was computed last
    ranges: dict[tuple[int, int], int] = {}  # (value, stage made) -> stage of its last reader
    for compute, stage in zip(computes, stages, strict=True):
        alternative = graph.ops[compute.op].alternatives[compute.alternative]
        for value in alternative.reads:
            number = problem.engine_values.get(value)
            if number is not None and number in made:
                ranges[number, made[number]] = stage
        for value in alternative.writes:
            number = problem.engine_values.get(value)
            if number is not None:
                made[number] = stage
    return [
        (value, since + 1, last) for (value, since), last in sorted(ranges.items()) if last > since
    ]


def _stages(problem: EngineProblem, computes: Sequence[Compute]) -> list[int]:
    """The stage of each compute: the position of the first computation that it precedes."""
    first: dict[OpId, int] = {}
    for index, compute in enumerate(computes):
        first.setdefault(compute.op, index)
    stages: list[int] = []
    following = problem.engine.op_count - 1
    for index, compute in reversed(list(enumerate(computes))):
        if first[compute.op] == index:
            following = problem.engine_ops[compute.op]
        stages.append(following)
    return stages[::-1]
