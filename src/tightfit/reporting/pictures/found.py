"""Results of planners as pictures show them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Found(msgspec.Struct, frozen=True):
    """The result of a planner at one budget."""

    budget: float  # in the unit of the picture's axis
    overhead: float | None  # of the plan, a fraction; None if there is no plan
    bound: float | None = None  # proven lower bound on the overhead, a fraction
    # ``"optimal"``: the plan is proven the best of the planner's search space. ``"infeasible"``: it
    # is proven that no plan exists. Others: neither.
    status: str = "feasible"

    @property
    def overhead_percent(self) -> float:
        """Not a number where there is no plan: that breaks a line."""
        return math.nan if self.overhead is None else 100 * self.overhead


def percents_of(points: Sequence[Found]) -> list[float]:
    """Return the overheads of plans in percent."""
    return [point.overhead_percent for point in points if point.overhead is not None]


def bounds_of(points: Sequence[Found]) -> list[tuple[float, float]]:
    """Return the budgets with a proven bound, and the bounds in percent, by budget."""
    return sorted((point.budget, 100 * point.bound) for point in points if point.bound is not None)


class Series(msgspec.Struct, frozen=True):
    """The results of one planner at several budgets, in any order."""

    name: str
    points: tuple[Found, ...]

    @property
    def ascending(self) -> tuple[Found, ...]:
        return tuple(sorted(self.points, key=lambda point: point.budget))
