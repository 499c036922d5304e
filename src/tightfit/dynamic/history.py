"""What the runtime remembers: contents of storages, and the calls that made them.

A storage that is written in place gets a new content; the old one can be computed again into
memory of its own. Views are not remembered: they lie in the storage that they view.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from tightfit.torch_private import storages

__all__ = ["MARK", "Blank", "Call", "Content", "Holder", "Place"]

MARK = "tightfit_online"
"""The attribute of a storage that says what it holds."""


class Content:
    """One content of one storage.

    Parameters
    ----------
    storage : torch.UntypedStorage
        Where it lies first.
    maker : Call or None
        What computes it; None: it cannot be computed again, and stays.
    is_backward : bool
        Whether it is a gradient under way.
    is_blank : bool
        Nobody has been seen writing it.
    """

    __slots__ = (
        "__weakref__",
        "_own",
        "_readers",
        "_storage",
        "fast_locks",
        "is_backward",
        "is_blank",
        "is_held",
        "is_resident",
        "last_op",
        "locks",
        "maker",
        "node",
        "size_bytes",
        "used_at",
    )

    def __init__(
        self,
        storage: torch.UntypedStorage,
        maker: Call | None,
        is_backward: bool = False,
        is_blank: bool = False,
    ) -> None:
        self.size_bytes = storage.nbytes()
        self.maker = maker
        self.is_backward = is_backward
        self.is_blank = is_blank
        self.is_resident = self.is_held = True
        self.locks = self.fast_locks = self.used_at = self.last_op = 0
        self.node: tuple[Any, int] | None = None
        self._storage = weakref.ref(storage)
        self._own: torch.UntypedStorage | None = None
        self._readers: list[weakref.ref[Call]] = []

    @property
    def memory(self) -> torch.UntypedStorage | None:
        """The storage it lies in, or would lie in; None if that is gone."""
        return self._own if self._own is not None else self._storage()

    @property
    def is_private(self) -> bool:
        """Whether it lies in memory that only the runtime knows."""
        return self._own is not None

    @property
    def readers(self) -> Iterator[Call]:
        """The calls that read it and may be needed again."""
        return (call for ref in self._readers if (call := ref()) is not None)

    def use(self, clock: int, op: int) -> None:
        self.used_at = clock
        self.last_op = op

    def lock(self) -> None:
        """Somebody waits who reads it."""
        self.locks += 1

    def fasten(self) -> None:
        """Somebody who locked it runs now."""
        self.fast_locks += 1

    def unlock(self, *, was_fast: bool) -> None:
        self.locks -= 1
        self.fast_locks -= was_fast

    def add_reader(self, reader: weakref.ref[Call]) -> None:
        count = len(self._readers)
        if count >= 8 and not count & (count - 1):  # now and then those that are gone are left out
            self._readers = [ref for ref in self._readers if ref() is not None]
        self._readers.append(reader)

    def leave(self) -> None:
        """Its memory holds it no longer."""
        self.is_resident = False
        self._own = None

    def lose_storage(self) -> None:
        """The program holds it no longer, or has written over it."""
        self.is_held = False
        if self._own is None:
            self.is_resident = False

    def arrive(self, own: torch.UntypedStorage | None = None) -> None:
        """It is there again, in memory of its own if no storage waits for it."""
        self.is_resident = True
        self._own = own
        self.node = None

    def move(self, own: torch.UntypedStorage) -> None:
        """A copy of it lies elsewhere; its storage holds something else."""
        self.is_held = False
        self._own = own

    def join(self, node: tuple[Any, int]) -> None:
        """Be a node of some classes of what is not resident."""
        self.node = node

    def stay(self) -> None:
        """Forget how it was computed: it is never evicted again."""
        self.maker = None


class Place:
    """A tensor argument: a content, and how the tensor lies in it."""

    __slots__ = ("content", "dtype", "is_conj", "is_neg", "offset", "size", "stride")

    def __init__(self, content: Content, tensor: torch.Tensor) -> None:
        self.content = content
        self.dtype = tensor.dtype
        self.offset = tensor.storage_offset()
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.is_conj = tensor.is_conj()
        self.is_neg = tensor.is_neg()

    def tensor_in(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor, lying in a storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor = tensor.set_(storage, self.offset, self.size, self.stride)
        if self.is_conj:
            tensor = tensor.conj()
        return storages.negated(tensor) if self.is_neg else tensor


class Blank:
    """A tensor argument that is written and not read: any memory will do.

    Parameters
    ----------
    place : Place
        How the tensor lay.
    """

    __slots__ = ("place", "size_bytes")

    def __init__(self, place: Place) -> None:
        self.size_bytes = place.content.size_bytes
        self.place = place


class Call:
    """An operator that ran, and all that is needed to run it again.

    Parameters
    ----------
    function : callable
        The overload.
    args, kwargs
        Its arguments, with `Place` and `Blank` for tensors.
    reads : dict
        The contents it read, with their storages.
    written : list of Content or Blank
        What it has overwritten.
    cost : int
        What the policy thinks it costs.
    drawn_from : tuple or None
        The generator it drew from, and its state before.
    with_grad : bool
        Whether gradients were enabled: some kernels return more then.
    """

    __slots__ = (
        "__weakref__",
        "_kept",
        "_kept_back",
        "_outputs",
        "args",
        "cost",
        "drawn_from",
        "function",
        "kwargs",
        "reads",
        "with_grad",
        "written",
    )

    def __init__(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        reads: dict[Content, torch.UntypedStorage],
        written: list[Content | Blank],
        cost: int,
        drawn_from: tuple[torch.Generator, torch.Tensor] | None,
        with_grad: bool,
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.reads = list(reads)
        self.written = written
        self.cost = cost
        self.drawn_from = drawn_from
        self.with_grad = with_grad
        self._outputs: list[weakref.ref[Content]] = []
        self._kept = {c: storage for c, storage in reads.items() if c.maker is None}
        self._kept_back: dict[Content, torch.UntypedStorage] = {}
        reader = weakref.ref(self)
        for content in self.reads:
            content.add_reader(reader)

    @property
    def outputs(self) -> list[Content | None]:
        """What it made: the new contents of what it wrote, then new storages; None if gone."""
        return [ref() for ref in self._outputs]

    def made(self, content: Content) -> None:
        self._outputs.append(weakref.ref(content))

    def keep(self, content: Content, storage: torch.UntypedStorage) -> None:
        """Hold what it reads and nobody can compute again."""
        self._kept[content] = storage

    def keep_reads(self) -> None:
        """A result was evicted: what it was computed from stays while that is so, or is evicted."""
        for content in self.reads:
            if content.is_resident and content.is_held and content not in self._kept:
                storage = content.memory
                if storage is not None:
                    self._kept_back[content] = storage

    def let_reads_go(self) -> None:
        """A result came back, or nobody wants it."""
        if self._kept_back:
            outputs = (output for output in self.outputs if output is not None)
            if all(output.is_resident or not output.is_held for output in outputs):
                self.forget_reads()

    def forget_reads(self) -> None:
        """Hold nothing for its results."""
        self._kept_back.clear()

    def let_go(self, content: Content) -> None:
        """A content that it reads has memory of its own now."""
        self._kept.pop(content, None)
        self._kept_back.pop(content, None)


class Holder:
    """Lies in a storage: says what the storage holds, and when it ends.

    Parameters
    ----------
    content : Content
        What it holds now.
    ended : deque of Content
        Where the end is told.
    """

    __slots__ = ("content", "ended")

    def __init__(self, content: Content, ended: deque[Content]) -> None:
        self.content = content
        self.ended = ended

    def becomes(self, content: Content) -> None:
        """The storage was written in place."""
        self.content = content

    def __del__(self) -> None:
        self.ended.append(self.content)
