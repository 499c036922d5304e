"""What the planners that solve a program share: cheap answers before, a plan after."""

from __future__ import annotations

from collections.abc import Sequence

from tightfit.plan.assemble import assemble, keep_everything
from tightfit.plan.plan import Compute, Outcome
from tightfit.plan.simulate import Simulation, simulate
from tightfit.planners.base import Limits, Task, finish, no_plan
from tightfit.planners.staged import Staged
from tightfit.units import format_bytes

__all__ = ["easy_answer", "judge"]


def judge(task: Task, computes: Sequence[Compute]) -> Simulation:
    """Return what a schedule really takes: bytes and seconds."""
    plan = assemble(
        task.graph, computes, budget_bytes=task.budget_bytes, gradients=task.gradients
    )
    return simulate(task.graph, plan)


def easy_answer(task: Task, problem: Staged, limits: Limits, started: float) -> Outcome | None:
    """Answer without a solver where keeping everything fits or a single op does not."""
    everything = keep_everything(task.graph)
    if judge(task, everything).peak_bytes <= task.budget_bytes:
        return finish(
            task, everything, bound=0.0, bound_source="trivial", started=started, gap=limits.gap
        )
    states = task.budget_bytes - task.graph.constant_bytes - problem.capacity_bytes
    missing = problem.least_bytes - problem.capacity_bytes
    if missing <= 0:
        return None
    proven = missing > states and all(
        len(op.alternatives) == 1 and len(op.alternatives[0].variants) == 1
        for op in task.graph.ops
    )
    return no_plan(
        started=started,
        proven=proven,
        bound_source="working set",
        note=f"one op alone needs {format_bytes(missing)} more than the budget",
    )
