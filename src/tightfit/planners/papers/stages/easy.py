"""Answers without a solver: everything fits, or a single op does not."""

from __future__ import annotations

import time

from tightfit.plan.assemble import keep_everything
from tightfit.plan.plan import Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.bounds import working_set_bytes
from tightfit.planners.outcomes import Bound, finish, no_plan, simulated
from tightfit.planners.papers.stages.staged import Staged, staged
from tightfit.units import format_bytes


def begin(task: Task, limits: Limits) -> tuple[float, Staged, Outcome | None]:
    """Return the time, the task in the papers' terms, and its outcome if no solver is needed."""
    started = time.perf_counter()
    problem = staged(task)
    easy = None
    everything = keep_everything(task.graph)
    needed, where = working_set_bytes(task.graph, task.gradients)
    if simulated(task, everything).peak_bytes <= task.budget_bytes:
        bound = Bound(0.0, "trivial")
        easy = finish(task, everything, bound=bound, started=started, gap=limits.gap)
    elif needed > task.budget_bytes or problem.capacity_bytes <= 0:
        name = "a step" if where is None else task.graph.ops[where].target
        note = f"{name} alone needs {format_bytes(needed)}"
        proven = needed > task.budget_bytes
        easy = no_plan(started=started, proven=proven, bound_source="working set", note=note)
    return started, problem, easy
