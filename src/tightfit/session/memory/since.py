"""Events since the last call of a fitted callable, and the memory left of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tightfit.allocator.tally import Tally


class SinceLastCall:
    """The behaviour of a loop between calls, as far as it shows.

    `has_stepped`: whether any optimizer of the parameters has ever stepped. `gradients_are_used`:
    whether any has stepped since the last backward: gradients that exist are used up.
    `sets_to_zero`: whether such gradients are set to zero in place and stay; None: not seen.
    `clears_late`: whether such gradients are cleared between forward and backward, and room that
    they leave is not needed otherwise; None: not seen.
    """

    def __init__(self) -> None:
        self.has_stepped = self.gradients_are_used = False
        self.clears_late: bool | None = None
        self.sets_to_zero: bool | None = None
        self._versions = 0  # of the gradients as an optimizer stepped
        self.used_bytes = 0  # used gradients as the last forward began: they are likely to go
        self._returned: list[weakref.ref[torch.Tensor]] | None = None

    def step_begins(self, versions: Callable[[], int]) -> None:
        """Note that an optimizer of the parameters steps.

        `versions`: returns how often the gradients were changed in place.
        """
        self.has_stepped = self.gradients_are_used = True
        if self.sets_to_zero is None:
            self._versions = versions()

    def forward_begins(self, gradient_bytes: int, versions: Callable[[], int]) -> None:
        """Note the gradients that exist as a forward begins."""
        if self.gradients_are_used and self.sets_to_zero is None:  # seen once is enough
            self.sets_to_zero = gradient_bytes > 0 and versions() > self._versions
        are_likely_to_go = self.gradients_are_used and not self.sets_to_zero
        self.used_bytes = gradient_bytes if are_likely_to_go else 0

    def backward_begins(self, gradient_bytes: Callable[[], int]) -> None:
        """Note the gradients that are left as a backward begins; once they stayed is enough."""
        if self.used_bytes and self.clears_late is not False:
            self.clears_late = gradient_bytes() == 0

    def backward_is_unusual(self) -> None:
        """Note that a call has several backwards, or one that is differentiated.

        The memory that code around them holds is not known.
        """
        self.clears_late = False

    @property
    def cleared_bytes(self) -> int:
        """Bytes of gradients that were cleared between the last forward and its backward."""
        return self.used_bytes if self.clears_late else 0

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
