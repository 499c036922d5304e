"""Buffers that a program changes between forward and backward, while a plan reads them again.

Plain PyTorch keeps values that a forward has computed of a buffer; a plan may compute them again.
Where the buffer is changed meanwhile, as the queue of momentum contrast is, that needs a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Sequence
from typing import Any

import torch

from tightfit.allocator.refusals import unless_refused
from tightfit.allocator.tally import before_refusals
from tightfit.capture.joint_graph import Source
from tightfit.execution import refused

__all__ = ["ChangingBuffers", "Unchanged"]


class ChangingBuffers:
    """Which buffers of a step may be changed between forward and backward.

    That is not known at first: the first call copies each that its backward reads. Later ones copy
    those that were seen to change.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._buffers = frozenset(i for i, s in enumerate(sources) if s.kind == "buffer")
        self._may_change = set(self._buffers)

    def copied(self, kept: Sequence[int], saved: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Return copies of those that may change, as far as there is room.

        `kept`: the placeholders that come first among saved values. The result: by the place among
        them.
        """
        places = [place for place, i in enumerate(kept) if i in self._may_change]
        made = {place: unless_refused(saved[place].clone) for place in places}
        return {place: copy for place, copy in made.items() if copy is not None}

    def saw(self, kept: Sequence[int], changed: Container[int]) -> None:
        """Note at which places kept tensors have changed when the backward began."""
        same = (i for place, i in enumerate(kept) if place not in changed)
        self._may_change.difference_update(same)

    def expect(self, position: int) -> None:
        """Copy a buffer from now on, if the placeholder is one: it has changed."""
        self._may_change.update({position} & self._buffers)


class Unchanged:
    """Saved tensors of a call must be unchanged at its backward, or be copied.

    `saved`: the values it keeps, at the end of its forward. `kept`: the placeholders that come
    first in it.
    """

    def __init__(
        self,
        saved: Sequence[Any],
        kept: Sequence[int],
        sources: Sequence[Source],
        changing: ChangingBuffers,
    ) -> None:
        tensors = ((i, t) for i, t in enumerate(saved) if isinstance(t, torch.Tensor))
        self._versions = [(i, weakref.ref(t), t._version) for i, t in tensors]
        self._kept = kept
        self._sources = sources
        self._changing = changing
        self._copies = changing.copied(kept, saved)
        if self._copies:
            _HELD.add(self)

    def check(self, *, with_copies: bool) -> None:
        """Refuse a backward that would read changed tensors.

        Raises `TightfitError`: names it.
        """
        for place, tensor in self._changed().items():
            if with_copies and place in self._copies:
                continue
            source = None
            if place < len(self._kept):
                source = self._sources[self._kept[place]]
                self._changing.expect(self._kept[place])
            raise refused.changed(source, tuple(tensor.shape))

    def read_copies(self, saved: list[Any]) -> None:
        """Put copies in the place of changed tensors, and free the others."""
        changed = self._changed()
        for place in changed:
            saved[place] = self._copies[place]
        self._changing.saw(self._kept, changed)
        self.release()

    def release(self) -> None:
        """Hold no copies."""
        self._copies.clear()

    def _changed(self) -> dict[int, torch.Tensor]:
        """Return tensors changed since, by their places."""
        there = ((place, known(), version) for place, known, version in self._versions)
        return {i: t for i, t, version in there if t is not None and t._version != version}


_HELD: weakref.WeakSet[Unchanged] = weakref.WeakSet()


def _release_all() -> None:
    while _HELD:
        _HELD.pop().release()


before_refusals(_release_all)
