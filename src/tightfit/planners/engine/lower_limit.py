"""A proven lower limit on the budget: the bytes that some op needs, computed from nothing.

A plan exists only if every op can be computed starting from an empty memory. The backward set
search (docs/search.md, "The least budget") finds the least bytes for that, any number of
recomputations allowed. Values kept to the end count as the given order makes them; where none are,
the limit holds for every order of first computations.
"""

from __future__ import annotations

import time

from tightfit._core import _engine
from tightfit.planners.base import Task
from tightfit.planners.bounds import working_set_bytes
from tightfit.planners.engine.problem import CROSSING, EngineProblem
from tightfit.progress import SILENT, Progress

_STATES = 30_000  # sets looked at per op
_OP_SECONDS = 0.3


def lower_limit(
    task: Task,
    problem: EngineProblem,
    *,
    seconds: float,
    enough_bytes: int | None = None,
    progress: Progress = SILENT,
) -> tuple[int, bool]:
    """Return bytes below which no plan exists, constants included, and whether all is settled.

    `seconds`: wall time; ops with the largest working set are examined first. `enough_bytes`: stop
    once the limit exceeds this. Not all is settled if time ran out for some op.
    """
    started = time.perf_counter()
    limit, _ = working_set_bytes(task.graph, task.gradients)
    constants = task.graph.constant_bytes
    settled = True
    for count, op in enumerate(_by_working_set(problem)):
        left = seconds - (time.perf_counter() - started)
        if left < 0 or (enough_bytes is not None and limit > enough_bytes):
            return limit, False
        if count % 16 == 0:
            progress.update(count, "lower limit")
        floor = limit - constants
        op_s = min(_OP_SECONDS, left)
        needed, exact = _engine.least_bytes(problem.engine, op, floor, _STATES, op_s)
        settled = settled and exact
        if needed > floor:
            limit = needed + constants
    return limit, settled


def _by_working_set(problem: EngineProblem) -> list[int]:
    """Required ops, by the bytes that they hold while they run, the largest first."""
    needs: dict[int, int] = {}
    for op, ways in enumerate(problem.alternatives):
        if not problem.required[op] or problem.graph_ops[op] == CROSSING:
            continue
        needs[op] = min(
            way.workspace_bytes + sum(problem.sizes[v] for v in {*way.reads, *way.writes})
            for way in ways
            if way.first
        )
    return sorted(needs, key=lambda op: (-needs[op], op))
