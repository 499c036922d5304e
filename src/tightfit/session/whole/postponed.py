"""Alternatives that are compared with their defaults during training, not before it."""

from __future__ import annotations

from tightfit.capture.captured import Captured
from tightfit.pricing.exactness import GradualComparison
from tightfit.pricing.price import measured_costs
from tightfit.pricing.quick import quick_costs
from tightfit.session.options import Options


def may_postpone(options: Options) -> bool:
    """Whether a first plan may do without alternatives that take long to compare.

    Not where that plan decides addresses, or the part of the budget that others get.
    """
    return options.searches_by_default and not (options.arena or options.is_shared)


class PostponedAlternatives:
    """The alternatives of a step that no plan may use yet.

    `captured`: the step with all alternatives, priced as if they were as exact as they state.
    `is_done`: whether all were compared for which there was room.
    """

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.is_done = False
        self._comparison = GradualComparison(captured)

    def go_on(self, seconds: float, room_bytes: int) -> None:
        """Compare for so long; see `pricing.exactness.GradualComparison`."""
        self.is_done = self.is_done or self._comparison.go_on(seconds, room_bytes)

    def compared(self, options: Options, room_bytes: int) -> Captured:
        """Compare all alternatives; return the step with those that are as exact as they state."""
        self.go_on(float("inf"), room_bytes)
        if self.captured.graph.device.kind != "cpu":
            return measured_costs(self.captured, options.progress).captured
        return quick_costs(self.captured, options.progress, room_bytes=room_bytes).captured
