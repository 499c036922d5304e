"""Results of planners as pictures show them."""

from __future__ import annotations

import msgspec


class Found(msgspec.Struct, frozen=True):
    """The result of a planner at one budget."""

    budget: float  # in the unit of the picture's axis
    overhead: float | None  # of the plan, a fraction; None if there is no plan
    bound: float | None = None  # proven lower bound on the overhead, a fraction
    # ``"optimal"``: the plan is proven the best of the planner's search space. ``"infeasible"``: it
    # is proven that no plan exists. Others: neither.
    status: str = "feasible"


class Series(msgspec.Struct, frozen=True):
    """The results of one planner at several budgets, in any order."""

    name: str
    points: tuple[Found, ...]

    @property
    def ascending(self) -> tuple[Found, ...]:
        return tuple(sorted(self.points, key=lambda point: point.budget))
