"""The curve of overhead against budget: from large to small budgets, each plan seeding the next.

See docs/search.md, "Many budgets".
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import msgspec

from tightfit.graph.ir import Graph
from tightfit.plan.plan import Gradients, Outcome
from tightfit.planners.anytime.planner import run_anytime
from tightfit.planners.base import Limits, Task
from tightfit.planners.outcomes import status_of
from tightfit.progress import SILENT, Progress, shown


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A budget in bytes, constants included, and the best that is known for it."""

    budget_bytes: int
    outcome: Outcome


def pareto_curve(
    graph: Graph,
    budgets: Sequence[int],
    gradients: Gradients = "fresh",
    limits: Limits | None = None,
    progress: Progress = SILENT,
) -> tuple[CurvePoint, ...]:
    """Plan a graph at many budgets with the default planner.

    `budgets`: bytes, constants included. `limits`: of each budget. An interruption ends the curve
    at the budgets done so far. Points come by budget, largest first. Monotone by construction: less
    budget never has a smaller overhead or bound. A plan of a smaller budget also serves a larger
    one, and a bound of a larger budget also holds for a smaller one. Budgets below a budget that is
    proven infeasible are not searched.
    """
    limits = limits or Limits()
    points: list[CurvePoint] = []
    bound, source = -math.inf, "trivial"
    seeds = ()
    with contextlib.suppress(KeyboardInterrupt), shown(progress, "curve", len(budgets)):
        for number, budget in enumerate(sorted(set(budgets), reverse=True)):
            progress.update(number, f"{budget} bytes")
            task = Task(graph=graph, budget_bytes=budget, gradients=gradients)
            if points and points[-1].outcome.status == "infeasible":
                outcome = msgspec.structs.replace(points[-1].outcome, seconds=0.0)
            else:
                result = run_anytime(task, limits, progress, seeds=seeds)
                seeds = result.schedules or seeds
                outcome = result.outcome
            if outcome.bound >= bound:
                bound, source = outcome.bound, outcome.bound_source
            outcome = _with_bound(outcome, bound, source, limits.gap)
            points.append(CurvePoint(budget_bytes=budget, outcome=outcome))
    return _smoothed(points, limits.gap)


def _with_bound(outcome: Outcome, bound: float, source: str, gap: float) -> Outcome:
    """Give an outcome a bound that holds for it, if that is better than its own."""
    if outcome.plan is None:
        return msgspec.structs.replace(outcome, bound=max(bound, outcome.bound))
    bound = min(bound, outcome.overhead)
    status = status_of(outcome.overhead, bound, gap)
    return msgspec.structs.replace(outcome, bound=bound, bound_source=source, status=status)


def _smoothed(points: list[CurvePoint], gap: float) -> tuple[CurvePoint, ...]:
    """Where a smaller budget has a cheaper plan, take it for the larger budget too."""
    best: Outcome | None = None
    smoothed: list[CurvePoint] = []
    for point in reversed(points):
        outcome = point.outcome
        if best is not None and best.plan is not None and best.overhead < outcome.overhead:
            plan = msgspec.structs.replace(best.plan, budget_bytes=point.budget_bytes)
            found = msgspec.structs.replace(
                outcome, plan=plan, overhead=best.overhead, peak_bytes=best.peak_bytes
            )
            outcome = _with_bound(found, outcome.bound, outcome.bound_source, gap)
        smoothed.append(CurvePoint(budget_bytes=point.budget_bytes, outcome=outcome))
        best = outcome
    return tuple(reversed(smoothed))
