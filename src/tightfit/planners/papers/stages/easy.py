"""Answers without a solver: everything fits, or a single op does not."""

from __future__ import annotations

from tightfit.plan.assemble import keep_everything
from tightfit.plan.plan import Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.bounds import working_set_bytes
from tightfit.planners.outcomes import Bound, finish, no_plan, simulated
from tightfit.planners.papers.stages.staged import Staged
from tightfit.units import format_bytes


def easy_answer(task: Task, problem: Staged, limits: Limits, started: float) -> Outcome | None:
    """Return the outcome where keeping everything fits or a single op does not; else None."""
    everything = keep_everything(task.graph)
    if simulated(task, everything).peak_bytes <= task.budget_bytes:
        return finish(
            task, everything, bound=Bound(0.0, "trivial"), started=started, gap=limits.gap
        )
    needed, where = working_set_bytes(task.graph, task.gradients)
    if needed <= task.budget_bytes and problem.capacity_bytes > 0:
        return None
    name = "a step" if where is None else task.graph.ops[where].target
    return no_plan(
        started=started,
        proven=needed > task.budget_bytes,
        bound_source="working set",
        note=f"{name} alone needs {format_bytes(needed)}",
    )
