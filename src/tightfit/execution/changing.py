"""Buffers that a program changes between forward and backward, while a plan reads them again.

Plain PyTorch keeps what a forward has computed of a buffer; a plan may compute it again. Where the
buffer is changed meanwhile, as the queue of momentum contrast is, that needs a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Sequence
from typing import Any

import torch

from tightfit.allocator.refusals import if_room
from tightfit.allocator.tally import before_refusals
from tightfit.capture.joint_graph import Source

__all__ = ["BufferCopies", "ChangingBuffers"]


class BufferCopies:
    """Copies of buffers for the backward of one call, as long as there is room.

    Parameters
    ----------
    copies : dict
        By the place in what is saved.
    """

    def __init__(self, copies: dict[int, torch.Tensor]) -> None:
        self._copies = copies
        _HELD.add(self)

    def __contains__(self, place: int) -> bool:
        """Whether there is a copy."""
        return place in self._copies

    def take(self, place: int) -> torch.Tensor:
        """Return a copy, which is not held here any more."""
        return self._copies.pop(place)

    def let_go(self) -> None:
        """Hold nothing."""
        self._copies.clear()


class ChangingBuffers:
    """Which buffers of a step may be changed between forward and backward.

    Nobody knows that at first: the first call copies each that its backward reads. Later ones copy
    those that were seen to change.

    Parameters
    ----------
    sources : sequence of Source
        What the placeholders of the step are.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._may_change = {i for i, source in enumerate(sources) if source.kind == "buffer"}

    def copied(self, kept: Sequence[int], saved: Sequence[Any]) -> BufferCopies | None:
        """Return copies of those that may change; None: there are none.

        Parameters
        ----------
        kept : sequence of int
            The placeholders that come first in what is saved.
        saved : sequence
            For the backward.
        """
        places = [place for place, i in enumerate(kept) if i in self._may_change]
        made = {place: if_room(saved[place].clone) for place in places}
        copies = {place: copy for place, copy in made.items() if copy is not None}
        return BufferCopies(copies) if copies else None

    def saw(self, kept: Sequence[int], changed: Container[int]) -> None:
        """Note at which places what was kept has changed when its backward began."""
        same = (i for place, i in enumerate(kept) if place not in changed)
        self._may_change.difference_update(same)

    def expect(self, position: int) -> None:
        """Copy a buffer from now on, if the placeholder is one: it has changed."""
        if self._sources[position].kind == "buffer":
            self._may_change.add(position)


_HELD: weakref.WeakSet[BufferCopies] = weakref.WeakSet()


def _let_go() -> None:
    while _HELD:
        _HELD.pop().let_go()


before_refusals(_let_go)
