"""The gain of the next, less exact class of alternatives within the same budget."""

from __future__ import annotations

import msgspec

from tightfit.graph.ir import EXACTNESS, Exactness
from tightfit.plan.plan import Outcome
from tightfit.units import format_percent

_NOTHING = 1e-9


class LessExact(msgspec.Struct, frozen=True):
    """The cost of a plan with a less exact class of alternatives."""

    exactness: Exactness  # the class
    # The least overhead found, that of the exact plan included; None: no plan was found. A fraction
    # of the step's cost with nothing recomputed.
    overhead: float | None
    bound: float  # the proven least
    before: float | None  # the overhead of the exact plan; None: there is none

    @classmethod
    def of(cls, exactness: Exactness, outcome: Outcome, before: float | None) -> LessExact:
        """Return the gain of a search with that class over an exact plan.

        `before`: the overhead of the exact plan, which the class allows, too; None: there is none.
        """
        known = (None if outcome.plan is None else outcome.overhead, before)
        found = [overhead for overhead in known if overhead is not None]
        bound = min([outcome.bound, *found])
        return cls(exactness, min(found) if found else None, bound, before)

    @property
    def sentence(self) -> str:
        """The gain in words."""
        classed = f"With alternatives of exactness {self.exactness}"
        if self.overhead is None:
            return f"{classed} no plan was found within this budget either."
        extra = f"an overhead of {format_percent(self.overhead)}"
        least = f"(proven least {format_percent(self.bound)})"
        if self.before is None:
            return f"{classed} a plan with {extra} {least} stays within this budget."
        if self.overhead < self.before:
            return f"{classed} a plan would have {extra} {least} within the same budget."
        if self.bound >= self.before - _NOTHING:
            return f"{classed} nothing would be gained within this budget (proven)."
        return f"{classed} no cheaper plan was found within this budget {least}."


def less_exact_than(exactness: Exactness) -> Exactness | None:
    """Return the next class of exactness; None behind the last."""
    following = EXACTNESS[EXACTNESS.index(exactness) + 1 :]
    return following[0] if following else None
