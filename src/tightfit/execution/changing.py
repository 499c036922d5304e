"""Tensors that a program changes between forward and backward, while a plan reads them again.

Plain PyTorch keeps values that a forward has computed of a buffer; a plan may compute them again.
Where the buffer is changed meanwhile, as the queue of momentum contrast is, that needs a copy.

Batch norm changes its running statistics without a new version, so plain PyTorch accepts them
changed between a forward and its backward. Plans write them so, too; such changes are counted here.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Container, Sequence
from itertools import repeat
from typing import Any

import torch

from tightfit.allocator.refusals import unless_refused
from tightfit.allocator.tally import before_refusals
from tightfit.capture.joint_graph import Source
from tightfit.execution import refused
from tightfit.torch_private import core as private

_UNCOUNTED: Counter[int] = Counter()  # by the identity of tensors
_REFERENCES: dict[int, weakref.ref[torch.Tensor]] = {}


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that differs after each change of a tensor."""
    return tensor._version + _UNCOUNTED.get(id(tensor), 0)


def versions_of(inputs: Sequence[Any]) -> list[int]:
    """Return the version of each tensor; 0 for inputs of other types."""
    versions = list(map(getattr, inputs, repeat("_version"), repeat(0)))
    if _UNCOUNTED.keys().isdisjoint(map(id, inputs)):
        return versions
    return list(map(operator.add, versions, map(_UNCOUNTED.get, map(id, inputs), repeat(0))))


def copy_uncounted(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy into tensors as kernels do that PyTorch takes to change nothing."""
    with private.same_versions(tuple(targets)):
        private.foreach_copy(targets, sources)
    counted = list(map(id, targets))
    if not _REFERENCES.keys() >= set(counted):
        _refer_to(targets)
    _UNCOUNTED.update(counted)


def _refer_to(tensors: Sequence[torch.Tensor]) -> None:
    """Have changes of tensors be forgotten when they are gone."""
    for tensor in tensors:
        own = id(tensor)

        def forget(_: weakref.ref[torch.Tensor], own: int = own) -> None:
            del _REFERENCES[own], _UNCOUNTED[own]

        _REFERENCES.setdefault(own, weakref.ref(tensor, forget))


class ChangingBuffers:
    """Which buffers of a step may be changed between forward and backward.

    That is not known at first: the first call copies each that its backward reads. Later calls
    copy buffers that were seen to change.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._buffers = frozenset(i for i, s in enumerate(sources) if s.kind == "buffer")
        self._may_change = set(self._buffers)

    def places(self, kept: Sequence[int]) -> list[int]:
        """Return the places, among kept placeholders, of buffers that may change."""
        if self._may_change.isdisjoint(kept):
            return []
        return [place for place, i in enumerate(kept) if i in self._may_change]

    def copied(self, places: Sequence[int], saved: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Return copies of saved values at some places, as far as there is room."""
        made = {place: unless_refused(saved[place].clone) for place in places}
        return {place: copy for place, copy in made.items() if copy is not None}

    def saw(self, kept: Sequence[int], changed: Container[int]) -> None:
        """Note at which places kept tensors have changed when the backward began."""
        same = (i for place, i in enumerate(kept) if place not in changed)
        self._may_change.difference_update(same)

    def expect(self, position: int) -> None:
        """Copy a placeholder from now on if it is a buffer: it has changed."""
        self._may_change.update({position} & self._buffers)


class Unchanged:
    """Saved tensors of a call must be unchanged at its backward, or be copied.

    `saved`: the values it keeps, at the end of its forward; its backward takes them out of the
    list. `kept`: the placeholders that come first in it.
    """

    def __init__(
        self,
        saved: list[Any],
        kept: Sequence[int],
        sources: Sequence[Source],
        changing: ChangingBuffers,
    ) -> None:
        self._saved = saved
        self._versions = versions_of(saved)
        self._kept = kept
        self._sources = sources
        self._changing = changing
        self._may_change = changing.places(kept)
        self._copies = changing.copied(self._may_change, saved) if self._may_change else {}
        if self._copies:
            _HELD.add(self)

    def check(self, *, with_copies: bool) -> None:
        """Refuse a backward that would read changed tensors.

        Raises `TightfitError`: names it.
        """
        for place in self._changed():
            if with_copies and place in self._copies:
                continue
            source = None
            if place < len(self._kept):
                source = self._sources[self._kept[place]]
                self._changing.expect(self._kept[place])
            raise refused.changed(source, tuple(self._saved[place].shape))

    def read_copies(self) -> None:
        """Put copies in the place of changed tensors, and free the others."""
        if not self._may_change:
            return
        changed = self._changed()
        for place in changed:
            self._saved[place] = self._copies[place]
        self._changing.saw(self._kept, changed)
        self.release()

    def release(self) -> None:
        self._copies.clear()

    def _changed(self) -> list[int]:
        """Return the places of tensors changed since."""
        now = versions_of(self._saved)
        if now == self._versions:
            return []
        pairs = zip(self._versions, now, strict=True)
        return [place for place, (before, after) in enumerate(pairs) if before != after]


_HELD: weakref.WeakSet[Unchanged] = weakref.WeakSet()


def _release_all() -> None:
    while _HELD:
        _HELD.pop().release()


before_refusals(_release_all)


class LateReads:
    """Parameters that a backward reads again after it has handed over their gradients.

    An optimizer that steps inside backward may change one of them right then.

    `reads`: placeholders, each with the number of the last group of gradients before which it is
    read. `inputs`: the tensors of all placeholders, as they are now.
    """

    def __init__(
        self,
        reads: Sequence[tuple[int, int]],
        inputs: Sequence[torch.Tensor],
        sources: Sequence[Source],
    ) -> None:
        self._read = [
            (last, weakref.ref(inputs[i]), version_of(inputs[i]), sources[i].name)
            for i, last in reads
        ]

    def check(self, group: int) -> None:
        """Raise `TightfitError` if a buffer was changed that is read for some group or later."""
        for last, reference, version, name in self._read:
            tensor = reference()
            if group <= last and tensor is not None and version_of(tensor) != version:
                raise refused.changed_during(name)
