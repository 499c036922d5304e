"""The largest batch whose step fits a budget at an acceptable overhead.

A captured step is exact but takes seconds. From the steps of two batch sizes the step of any other
is estimated at once. So the answer is looked for among estimates, and proven by a plan of the
captured step. Where that fails, a smaller batch is looked for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import msgspec

from tightfit.errors import InfeasibleBudget, InvalidPlan, PlanMismatch
from tightfit.graph.ir import Graph
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan.plan import Outcome
from tightfit.planners.questions.request import PlanRequest
from tightfit.planners.questions.rescale import extrapolated, rescaled
from tightfit.progress import SILENT, Progress, shown
from tightfit.units import format_bytes

GraphOf = Callable[[int], Graph]
"""Gives the graph of a batch size."""

_MOST_BATCH = 1 << 24
_SAMPLES = (4, 8)  # batch sizes from which others are estimated
_TRIAL_S = 2.0  # to plan each estimated batch size
_STEP_DOWN = 0.98  # from a batch whose captured step does not fit


class LargestBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The largest batch found, its plan, and the smallest batch for which none was found."""

    batch: int
    outcome: Outcome
    too_large: int | None


class ProvenBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The largest batch whose captured step has a plan."""

    batch: int  # examples per batch
    # The largest batch that fits with nothing recomputed, by estimate; 0 if none does
    without_plan: int
    # graph, outcome: the step captured at `batch`, and its plan
    graph: Graph
    outcome: Outcome
    too_large: int | None  # the smallest batch for which no plan was found; None if none was


def proven_batch(
    captured: GraphOf, request: PlanRequest, progress: Progress = SILENT
) -> ProvenBatch:
    """Find the largest batch by estimate, and prove it by a plan of the captured step.

    `captured`: captures the step at a batch size; called once for each size that is needed. Raises
    `InfeasibleBudget` if not even a batch of 1 fits.
    """
    return _Search(captured, request).run(progress)


class _Search:
    """The search over estimated steps, and the proof by a captured step."""

    def __init__(self, captured: GraphOf, request: PlanRequest) -> None:
        self.captured = functools.cache(captured)
        self.estimated = _estimate(self.captured)
        self.request = request

    def run(self, progress: Progress) -> ProvenBatch:
        """Return the largest batch whose captured step has a plan."""
        most, too_large = _MOST_BATCH, None
        while True:
            found = self._guess(most, progress)
            graph = self.captured(found.batch)
            outcome = self._planned(found, graph, progress)
            if outcome is not None:
                return ProvenBatch(
                    batch=found.batch,
                    without_plan=largest_batch_without_plan(self.estimated, self.request),
                    graph=graph,
                    outcome=outcome,
                    too_large=too_large or found.too_large,
                )
            if found.batch == 1:
                raise _no_batch(self.request)
            too_large = found.batch
            most = max(1, min(found.batch - 1, int(_STEP_DOWN * found.batch)))

    def _guess(self, most: int, progress: Progress) -> LargestBatch:
        limits = self.request.limits
        limits = msgspec.structs.replace(limits, seconds=min(_TRIAL_S, limits.seconds))
        return largest_batch(
            self.estimated, msgspec.structs.replace(self.request, limits=limits), progress, most
        )

    def _planned(self, found: LargestBatch, graph: Graph, progress: Progress) -> Outcome | None:
        """Plan the captured step; where that fails, try the plan of the estimated step."""
        outcome = self.request.planned(graph, progress)
        if self.request.accepts(outcome):
            return outcome
        return _carried_over(found.outcome, self.estimated(found.batch), graph, self.request)


def _estimate(captured: GraphOf) -> GraphOf:
    """A quick function from a batch size to its step; the capture itself where steps differ."""
    small, large = _SAMPLES
    try:
        return functools.cache(extrapolated(captured(small), captured(large), _SAMPLES))
    except PlanMismatch:
        return captured


def largest_batch(
    graph_of: GraphOf, request: PlanRequest, progress: Progress = SILENT, most: int = _MOST_BATCH
) -> LargestBatch:
    """Find the largest batch by doubling, then bisection; the answer is planned, not extrapolated.

    `graph_of`: gives the graph of a batch size, captured or rescaled. `most`: no larger batch is
    tried. Raises `InfeasibleBudget` if not even a batch of 1 fits.
    """
    best: tuple[int, Graph, Outcome] | None = None
    low, high = 0, None
    with shown(progress, "largest batch"):
        while high is None or high - low > 1:
            batch = min(max(1, 2 * low), most) if high is None else (low + high) // 2
            if batch == low:
                break
            progress.update(batch, f"batch {batch}")
            graph = graph_of(batch)
            outcome = None
            if best is not None:
                outcome = _carried_over(best[2], best[1], graph, request)
            if outcome is None:
                outcome = request.planned(graph, progress)
            if request.accepts(outcome):
                low, best = batch, (batch, graph, outcome)
            else:
                high = batch
    if best is None:
        raise _no_batch(request)
    return LargestBatch(batch=best[0], outcome=best[2], too_large=high)


def _no_batch(request: PlanRequest) -> InfeasibleBudget:
    """Return the error that says that no batch fits."""
    budget_bytes, most = request.budget_bytes, request.max_overhead
    allowed = "" if math.isinf(most) else f" at an overhead of at most {most:.1%}"
    return InfeasibleBudget(
        f"not even a batch of 1 fits {format_bytes(budget_bytes)}{allowed}: give more memory"
        + (" or allow more overhead" if allowed else ""),
        budget_bytes=budget_bytes,
    )


def largest_batch_without_plan(graph_of: GraphOf, request: PlanRequest) -> int:
    """Return the largest batch that fits a budget with nothing recomputed; 0 if none does."""

    def fits(batch: int) -> bool:
        peak_bytes = eager_peak_bytes(graph_of(batch), gradients=request.gradients)
        return peak_bytes <= request.budget_bytes

    low, high = 0, 1
    while high <= _MOST_BATCH and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _carried_over(
    outcome: Outcome, graph: Graph, other: Graph, request: PlanRequest
) -> Outcome | None:
    """The plan of a graph on the graph of another batch, if it serves there."""
    assert outcome.plan is not None
    try:
        outcome = rescaled(outcome.plan, graph, request.task(other))
    except (InvalidPlan, PlanMismatch):
        return None
    return outcome if request.accepts(outcome) else None
