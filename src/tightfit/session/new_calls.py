"""Calls that need another plan each time, because their sizes or branches keep changing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tightfit.capture.calls.signature import shape_of_call
from tightfit.capture.calls.structure import Arguments

_IN_A_ROW = 6  # planned calls, each of which needed another plan
_MOST_SHAPES = 4096  # that are remembered
_GROWTH_POWER = 2  # of the inputs' size: a step grows at most like attention


class NewCalls:
    """Decides which calls run as plain PyTorch because their plans would not be used again.

    Capturing and planning takes seconds. A graph network has other sizes in each step, and a model
    that drops layers at random runs other operators: such a plan is used once. After a few calls
    in a row that each needed another plan, a further call of a new shape runs as plain PyTorch if
    that fits. A shape that comes again is planned, unless it needed another plan each time.
    """

    def __init__(self) -> None:
        self._in_a_row = 0
        self._plans: dict[Any, int] = {}  # by shape: how many it needed; 0: it ran eagerly
        self._elements = 0  # of the inputs of the last call that needed a plan

    @property
    def are_many(self) -> bool:
        """Whether several calls in a row have needed another plan each."""
        return self._in_a_row >= _IN_A_ROW

    def runs_eagerly(self, given: Arguments, fits: Callable[[float], bool]) -> bool:
        """Whether a call runs as plain PyTorch.

        `fits`: whether a multiple of the bytes of plain PyTorch in the last planned call fits.
        """
        if not self.are_many or self._plans.get(_shape_of(given)) in (0, 1):
            return False
        growth = max(1.0, given.elements / max(1, self._elements))
        return fits(growth**_GROWTH_POWER)

    def note_plain(self, given: Arguments) -> None:
        shape = _shape_of(given)
        self._remember(shape, self._plans.get(shape, 0))

    def note_planned(self, given: Arguments, *, is_new: bool) -> None:
        """Note a call that has run by a plan; `is_new`: whether Dynamo followed Python for it."""
        if not is_new:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        self._elements = given.elements
        shape = _shape_of(given)
        self._remember(shape, self._plans.get(shape, 0) + 1)

    def _remember(self, shape: Any, plans: int) -> None:
        self._plans.pop(shape, None)
        self._plans[shape] = plans
        while len(self._plans) > _MOST_SHAPES:
            del self._plans[next(iter(self._plans))]


def _shape_of(given: Arguments) -> tuple[Any, ...]:
    return shape_of_call(given.leaves, given.spec)
