"""The largest batch whose step fits a budget at an acceptable overhead."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from tightfit.errors import InfeasibleBudget, InvalidPlan, PlanMismatch
from tightfit.graph.ir import Graph
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan.plan import Gradients, Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.questions.rescale import rescaled
from tightfit.planners.registry import DEFAULT, plan_with
from tightfit.progress import SILENT, Progress
from tightfit.units import format_bytes

__all__ = ["MOST_BATCH", "LargestBatch", "largest_batch", "largest_batch_without_plan", "no_batch"]

MOST_BATCH = 1 << 24


class LargestBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The largest batch found, its plan, and the smallest batch for which none was found."""

    batch: int
    outcome: Outcome
    too_large: int | None


def largest_batch(
    graph_of: Callable[[int], Graph],
    budget_bytes: int,
    *,
    max_overhead: float = float("inf"),
    gradients: Gradients = "fresh",
    limits: Limits | None = None,
    progress: Progress = SILENT,
    planner: str = DEFAULT,
    most: int = MOST_BATCH,
) -> LargestBatch:
    """Find the largest batch by doubling, then bisection; the answer is planned, not extrapolated.

    Parameters
    ----------
    graph_of : callable
        Gives the graph of a batch size, captured or rescaled.
    budget_bytes : int
        Constants included.
    max_overhead : float
        The largest acceptable overhead, a fraction.
    limits : Limits
        Of each batch size that is tried; by default 5 seconds.
    most : int
        No larger batch is tried.

    Raises
    ------
    InfeasibleBudget
        If not even a batch of 1 fits.
    """
    limits = limits or Limits(seconds=5.0)
    best: tuple[int, Graph, Outcome] | None = None
    low, high = 0, None
    progress.start("largest batch")
    try:
        while high is None or high - low > 1:
            batch = min(max(1, 2 * low), most) if high is None else (low + high) // 2
            if batch == low:
                break
            progress.update(batch, f"batch {batch}")
            graph = graph_of(batch)
            task = Task(graph=graph, budget_bytes=budget_bytes, gradients=gradients)
            outcome = _reuse(best, task, max_overhead)
            if outcome is None:
                outcome = plan_with(planner, task, limits, progress)
            if outcome.plan is not None and outcome.overhead <= max_overhead:
                low, best = batch, (batch, graph, outcome)
            else:
                high = batch
    finally:
        progress.stop()
    if best is None:
        raise no_batch(budget_bytes, max_overhead)
    return LargestBatch(batch=best[0], outcome=best[2], too_large=high)


def no_batch(budget_bytes: int, max_overhead: float) -> InfeasibleBudget:
    """Return the error that says that no batch fits."""
    allowed = "" if math.isinf(max_overhead) else f" at an overhead of at most {max_overhead:.1%}"
    return InfeasibleBudget(
        f"not even a batch of 1 fits {format_bytes(budget_bytes)}{allowed}: give more memory"
        + (" or allow more overhead" if allowed else ""),
        budget_bytes=budget_bytes,
    )


def largest_batch_without_plan(
    graph_of: Callable[[int], Graph], budget_bytes: int, *, gradients: Gradients = "fresh"
) -> int:
    """Return the largest batch that fits a budget with nothing recomputed; 0 if none does."""
    low, high = 0, 1
    while (
        high <= MOST_BATCH and eager_peak_bytes(graph_of(high), gradients=gradients) <= budget_bytes
    ):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = eager_peak_bytes(graph_of(middle), gradients=gradients) <= budget_bytes
        low, high = (middle, high) if fits else (low, middle)
    return low


def _reuse(
    best: tuple[int, Graph, Outcome] | None, task: Task, max_overhead: float
) -> Outcome | None:
    """The best plan so far on the new graph, if it still serves."""
    if best is None or best[2].plan is None:
        return None
    try:
        outcome = rescaled(best[2].plan, best[1], task)
    except (InvalidPlan, PlanMismatch):
        return None
    return outcome if outcome.overhead <= max_overhead else None
