"""The longest inputs that fit a budget: a bisection over the lengths that a data set has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from tightfit.graph.ir import Graph
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan.plan import Outcome
from tightfit.planners.questions.minimum import minimum_budget
from tightfit.planners.questions.request import PlanRequest
from tightfit.progress import Progress


class PlannedLength(msgspec.Struct, frozen=True, kw_only=True):
    length: int  # of the inputs, such as tokens
    eager_peak_bytes: int  # the peak with nothing recomputed, constants included
    outcome: Outcome  # the plan within the budget, or that there is none

    @property
    def fits(self) -> bool:
        return self.outcome.plan is not None


class LongestFit(msgspec.Struct, frozen=True, kw_only=True):
    """Which lengths fit."""

    longest: int | None  # the longest of the lengths asked about that fits; None: none does
    # Planned lengths, the shortest first. Memory is taken to grow with the length between.
    tried: tuple[PlannedLength, ...]
    minimum_bytes: int | None  # a budget that holds the longest of all; None where it fits as it is


def longest_fit(
    captured: Callable[[int], Graph],
    lengths: Sequence[int],
    request: PlanRequest,
    progress: Progress,
) -> LongestFit:
    """Find the longest inputs for which there is a plan within the budget.

    `captured`: returns the step's graph at a length. `lengths`: the lengths that occur; at least
    one.
    """
    distinct = sorted(set(lengths))
    tried: dict[int, PlannedLength] = {}
    graphs: dict[int, Graph] = {}

    def fits(position: int) -> bool:
        length = distinct[position]
        if length not in tried:
            graph = graphs[length] = captured(length)
            tried[length] = PlannedLength(
                length=length,
                eager_peak_bytes=eager_peak_bytes(graph, gradients=request.gradients),
                outcome=request.planned(graph, progress),
            )
        return tried[length].fits

    least_bytes = None
    low, high = -1, len(distinct) - 1  # positions: a length that fits, a length that may not
    if fits(high):
        low = high
    else:
        graph = graphs[distinct[high]]
        least = minimum_budget(graph, request.gradients, request.limits, progress)
        least_bytes = least.found_bytes
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return LongestFit(
        longest=distinct[low] if low >= 0 else None,
        tried=tuple(tried[length] for length in sorted(tried)),
        minimum_bytes=least_bytes,
    )
