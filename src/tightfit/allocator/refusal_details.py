"""What the error of a request that a limit refuses says about it, as far as known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """The code that a refused request comes from."""

    sentence: str
    ways: str  # ways out that it has in addition to those of any


UNKNOWN = Origin(
    "The request comes from outside the planned step, or more is held than was planned for",
    "; a loss is planned, too, by tightfit.step",
)
BEFORE_BACKWARD = Origin(
    "The request comes from code between a planned forward and its backward",
    "; tightfit.step plans that code, too",
)
BETWEEN_CALLS = Origin(
    "The request comes from code that no planned call waits for: no plan can give it room", ""
)


def before_first_call(methods: Sequence[str]) -> Origin:
    """Return the origin of a request before anything that was fitted was called.

    `methods`: of the fitted module, that the training may call in place of its forward.
    """
    ways = f"; methods={list(methods)} of fit plans these, too" if methods else ""
    return Origin("No planned call has run yet: no plan can give it room", ways)


@dataclass(frozen=True)
class RefusalDetails:
    """What such an error says."""

    budget_bytes: int = 0  # it names at least this budget
    coming_bytes: int = 0  # will be held later, in addition to what a refused request asks for
    origin: Origin = UNKNOWN
