"""Checkmate-O: Checkmate's schedule, and then greedily a better implementation for each op.

The schedule is decided first and with default implementations; which others fit is looked at one
op after the other (MONeT, section 6.3). The difference shows the gain of choosing both at once.
"""

from __future__ import annotations

import time

from tightfit.errors import InvalidPlan
from tightfit.graph.ir import Graph, OpId
from tightfit.plan.plan import Compute, Outcome
from tightfit.plan.verify import verify
from tightfit.planners.base import Limits, Task
from tightfit.planners.outcomes import finish, no_plan, plan_of
from tightfit.planners.papers.checkmate.planner import plan_checkmate
from tightfit.progress import Progress


def plan_checkmate_o(task: Task, limits: Limits, progress: Progress) -> Outcome:
    """Plan with Checkmate and replace implementations where that makes the plan cheaper."""
    started = time.perf_counter()
    found = plan_checkmate(task, limits, progress)
    if found.plan is None:
        return no_plan(started=started, proven=False, bound=-1.0, note=found.note)
    computes = _cheaper(task, found.plan.computes, started + limits.seconds)
    return finish(task, computes, started=started, gap=limits.gap)


def _cheaper(task: Task, computes: list[Compute], deadline: float) -> list[Compute]:
    """Try for each compute the cheaper implementations, the cheapest first."""
    linked = {
        pair for choice in task.graph.choices for branch in choice.branches for pair in branch
    }
    first: set[OpId] = set()
    for place, compute in enumerate(computes):
        use = "first" if compute.op not in first else "again"
        first.add(compute.op)
        for other in _cheaper_than(task.graph, compute, use):
            if time.perf_counter() > deadline:
                return computes
            if (other.op, other.alternative) in linked:
                continue
            changed = [*computes[:place], other, *computes[place + 1 :]]
            if _is_within(task, changed):
                computes = changed
                break
    return computes


def _cheaper_than(graph: Graph, compute: Compute, use: str) -> list[Compute]:
    op = graph.ops[compute.op]
    own, now_s = compute.alternative_in(graph), compute.cost_s(graph)
    ways = [
        (variant.cost_s, Compute(op.id, number, index))
        for number, way in enumerate(op.alternatives)
        if way.use in ("any", use) and set(way.writes) >= set(own.writes)
        for index, variant in enumerate(way.variants)
        if variant.cost_s < now_s
    ]
    return [other for _, other in sorted(ways, key=lambda way: way[0])]


def _is_within(task: Task, computes: list[Compute]) -> bool:
    try:
        verify(plan_of(task, computes), task.graph)
    except InvalidPlan:  # a value does not exist, such as a mask, or the budget is exceeded
        return False
    return True
