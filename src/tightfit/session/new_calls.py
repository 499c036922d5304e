"""Calls that need ever new plans, because their sizes or branches keep changing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["NewCalls", "sizes_of"]

_IN_A_ROW = 6  # planned calls, each of which needed another plan
_MOST_SHAPES = 4096  # that are remembered
_AT_MOST = 2  # the power of its inputs' size by which a step grows: that of attention


class NewCalls:
    """Decides which calls run as plain PyTorch because a plan of theirs would not be used again.

    Capturing and planning takes seconds. A graph network has other sizes in each step, and layers
    left out at random have other operators: such a plan is used once. After a few calls in a row
    that each needed another plan, a further such call runs as plain PyTorch if that fits. A shape
    that comes again is planned, unless it needed another plan each time.
    """

    def __init__(self) -> None:
        self._in_a_row = 0
        self._plans: dict[Any, int] = {}  # by shape: how many it needed; 0: it ran plainly
        self._sizes: tuple[int, ...] = ()  # of the last planned call

    def runs_plainly(
        self, shape: Any, sizes: tuple[int, ...], plain_bytes: Callable[[], int], room_bytes: int
    ) -> bool:
        """Whether a call runs as plain PyTorch.

        `shape`: as of `shape_of_call`. `sizes`: elements of its tensors. `plain_bytes`: returns
        what plain PyTorch takes for a call like the last planned one. `room_bytes`: the budget.
        """
        if self._in_a_row < _IN_A_ROW:
            return False
        plans = self._plans.get(shape)
        if plans in (0, 1):
            return False
        growth = max(1.0, sum(sizes) / max(1, sum(self._sizes)))
        if plain_bytes() * growth**_AT_MOST > room_bytes:
            return False
        self._remember(shape, plans or 0)
        return True

    def note_planned(self, shape: Any, sizes: tuple[int, ...], *, is_new: bool) -> None:
        """Note a call that has run by a plan.

        `is_new`: whether Dynamo followed Python for it.
        """
        if not is_new:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        self._sizes = sizes
        self._remember(shape, self._plans.get(shape, 0) + 1)

    def _remember(self, shape: Any, plans: int) -> None:
        self._plans.pop(shape, None)
        self._plans[shape] = plans
        while len(self._plans) > _MOST_SHAPES:
            del self._plans[next(iter(self._plans))]


def sizes_of(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Return the number of elements of each tensor of a call."""
    return tuple(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
