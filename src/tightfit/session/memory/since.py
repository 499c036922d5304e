"""Events since the last call of a fitted callable, and the memory left of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from tightfit.allocator.tally import Tally


class SinceLastCall:
    """The behaviour of a loop between calls, as far as it shows.

    `has_stepped`: whether any optimizer of the parameters has ever stepped. `gradients_are_used`:
    whether any has stepped since the last backward: gradients that exist are used up.
    """

    def __init__(self) -> None:
        self.has_stepped = self.gradients_are_used = False
        self._returned: list[weakref.ref[torch.Tensor]] | None = None

    def step_begins(self) -> None:
        """Note that an optimizer of the parameters steps."""
        self.has_stepped = self.gradients_are_used = True

    def backward_ended(self) -> None:
        """Note that gradients were made, or added to."""
        self.gradients_are_used = False

    def forward_ended(self, outputs: Iterable[Any]) -> None:
        """Note outputs of a call: the caller may hold them until the next has ended."""
        self._returned = [weakref.ref(x) for x in outputs if isinstance(x, torch.Tensor)]

    def returned_bytes(self, tally: Tally | None) -> int | None:
        """Return bytes still held of the last call's outputs; None: there was no call."""
        if self._returned is None or tally is None:
            return None
        there = (known() for known in self._returned)
        return tally.counted_bytes([x for x in there if x is not None])
