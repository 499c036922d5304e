"""A plan made for one batch size, used for another."""

from __future__ import annotations

import time

from tightfit.errors import PlanMismatch
from tightfit.graph.ir import Graph
from tightfit.plan.plan import Compute, Outcome, Plan
from tightfit.planners.base import Task, finish

__all__ = ["rescaled"]


def rescaled(plan: Plan, graph: Graph, task: Task) -> Outcome:
    """Return the same computes on another graph of the same model, verified anew.

    Parameters
    ----------
    plan : Plan
        Made for `graph`.
    task : Task
        The same step with other sizes (another batch), and its budget in bytes.

    Raises
    ------
    PlanMismatch
        If the graphs differ in more than sizes and costs.
    InvalidPlan
        If the plan does not stay within the task's budget.
    """
    started = time.perf_counter()
    if _structure(graph) != _structure(task.graph):
        raise PlanMismatch(
            f"a plan for {graph.name or 'one graph'!r} cannot be used for "
            f"{task.graph.name or 'the other'!r}: they differ in more than sizes; plan again"
        )
    computes = [step for step in plan.instructions if isinstance(step, Compute)]
    return finish(task, computes, started=started)


def _structure(graph: Graph) -> object:
    """What has to be equal: operators, what they read and write, roles, segments."""
    return (
        [(v.role, v.fate, v.replaces, v.segment) for v in graph.values],
        [
            (
                op.target,
                op.segment,
                op.required,
                op.pinned is not None,
                [
                    (a.reads, a.writes, a.overwrites, a.use, len(a.variants))
                    for a in op.alternatives
                ],
            )
            for op in graph.ops
        ],
        [(s.phase, s.program) for s in graph.segments],
    )
