"""What the planners that solve a program share: cheap answers before, grains, a plan after."""

from __future__ import annotations

from tightfit.plan.assemble import keep_everything
from tightfit.plan.plan import Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.bounds import working_set_bytes
from tightfit.planners.outcomes import finish, judge, no_plan
from tightfit.planners.solvers import grains
from tightfit.planners.stages.staged import Staged
from tightfit.units import format_bytes

__all__ = ["NO_PLAN_HERE", "easy_answer", "grains_of"]

NO_PLAN_HERE = "proven: no plan in its own search space"
"""Note of an outcome whose program is infeasible: no proof for plans outside that space."""


def grains_of(problem: Staged) -> list[int]:
    """Return what the bytes of values that may be made again are multiples of."""
    sizes = [value.size_bytes for value in problem.values.values() if value.recoverable]
    return grains(sizes, problem.capacity_bytes)


def easy_answer(task: Task, problem: Staged, limits: Limits, started: float) -> Outcome | None:
    """Answer without a solver where keeping everything fits or a single op does not."""
    everything = keep_everything(task.graph)
    if judge(task, everything).peak_bytes <= task.budget_bytes:
        return finish(
            task, everything, bound=0.0, bound_source="trivial", started=started, gap=limits.gap
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
