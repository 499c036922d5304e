"""The history of a region: contents of storages, and the calls that made them.

A storage that is written in place gets a new content; the old content can be computed again into
memory of its own. Views are not remembered: they share the storage that they view.

One of each is made for every operator, so a field that is seldom set is an attribute of the class
until it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tightfit.torch_private.traces import negative_view

MARK = "tightfit_online"
"""The attribute of a storage that names its content."""


class StorageMark(weakref.ref[torch.UntypedStorage]):
    """A storage, held weakly, and its content; its callback is called when the storage ends.

    The storage has it as `MARK`, so that its content is found.
    """

    __slots__ = ("content",)
    content: Content

    def becomes(self, content: Content) -> None:
        """Note the content of a storage that is met, or was written in place."""
        self.content = content
        content.attach_to(self)


class Content:
    """One content of one storage.

    `maker`: the call that computes it; None: it cannot be computed again, and stays. `is_backward`:
    whether it is a gradient in flight. `is_blank`: no write to it was seen, as after
    ``torch.empty``. `used_at`, `last_op`: the clock, and the number of operators that had run, when
    it was last used.
    """

    is_resident = True
    is_held = True
    is_blank = False
    locks = 0
    fast_locks = 0
    node: tuple[Any, int] | None = None
    known_cost: int | None = None
    """Its cost with all that it needs first, as the pool found it; None: to be found."""
    _mark: StorageMark | None = None
    _own: torch.UntypedStorage | None = None
    _readers: list[weakref.ref[Call]] | None = None

    def __init__(
        self,
        size_bytes: int,
        maker: Call | None,
        is_backward: bool = False,
        used_at: int = 0,
        last_op: int = 0,
    ) -> None:
        self.size_bytes = size_bytes
        self.maker = maker
        self.is_backward = is_backward
        self.used_at = used_at
        self.last_op = last_op

    @property
    def memory(self) -> torch.UntypedStorage | None:
        """Its storage, or that to which it is to return; None if that is gone."""
        if self._own is not None:
            return self._own
        return None if self._mark is None else self._mark()

    @property
    def is_private(self) -> bool:
        """Whether it is in memory that only the runtime knows."""
        return self._own is not None

    @property
    def readers(self) -> Iterator[Call]:
        """The calls that read it and may be needed again."""
        return (call for ref in self._readers or () if (call := ref()) is not None)

    def attach_to(self, mark: StorageMark) -> None:
        """Become the content of a storage that the program holds."""
        self._mark = mark

    def use(self, clock: int, op: int) -> None:
        self.used_at = clock
        self.last_op = op

    def lock(self) -> None:
        """Lock it for a call that waits and will read it."""
        self.locks += 1

    def mark_running(self) -> None:
        """Note that a call that locked it runs now."""
        self.fast_locks += 1

    def unlock(self, *, was_fast: bool) -> None:
        self.locks -= 1
        self.fast_locks -= was_fast

    def pin(self, clock: int, op: int) -> None:
        """Lock it for an operator of the program that reads it and runs now."""
        self.used_at = clock
        self.last_op = op
        self.locks += 1
        self.fast_locks += 1

    def unpin(self) -> None:
        self.locks -= 1
        self.fast_locks -= 1

    def add_reader(self, reader: weakref.ref[Call]) -> None:
        readers = self._readers
        if readers is None:
            self._readers = [reader]
            return
        count = len(readers)
        if count >= 8 and not count & (count - 1):  # now and then drop readers that are gone
            self._readers = readers = [ref for ref in readers if ref() is not None]
        readers.append(reader)

    def know_cost(self, cost: int | None) -> None:
        self.known_cost = cost

    def leave(self) -> None:
        """Note that its memory holds it no longer."""
        self.is_resident = False
        self._own = None

    def lose_storage(self) -> None:
        """Note that the program holds it no longer, or has written over it."""
        self.is_held = False
        self._mark = None
        if self._own is None:
            self.is_resident = False

    def arrive(self, own: torch.UntypedStorage | None = None) -> None:
        """Note that it is resident again; `own`: its memory, if no storage waits for it."""
        self.is_resident = True
        self._own = own
        self.node = None

    def move(self, own: torch.UntypedStorage) -> None:
        """Note that a copy of it is in other memory; its storage holds something else."""
        self.is_held = False
        self._mark = None
        self._own = own

    def join(self, node: tuple[Any, int]) -> None:
        """Be a node of some classes of evicted contents."""
        self.node = node

    def stay(self) -> None:
        """Forget how it was computed: it is never evicted again."""
        self.maker = None


class Place:
    """A tensor argument: a content, and the tensor's geometry in it."""

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
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor = tensor.set_(storage, self.offset, self.size, self.stride)
        if self.is_conj:
            tensor = tensor.conj()
        return negative_view(tensor) if self.is_neg else tensor


class Blank:
    """A tensor argument that is written and not read: any memory will do."""

    __slots__ = ("device", "place", "size_bytes")

    def __init__(self, place: Place, device: torch.device) -> None:
        self.size_bytes = place.content.size_bytes
        self.place = place
        self.device = device


class Call:
    """An operator that ran, and all that is needed to run it again.

    `args`, `kwargs`: its arguments, with `Place` and `Blank` for tensors. `reads`: the contents it
    read, with their storages. `cost`: its cost in the view of the policy. `with_grad`: whether
    gradients were enabled: some kernels return more then.
    """

    written: Sequence[Content | Blank] = ()
    # The generator it drew from, and its state before
    drawn_from: tuple[torch.Generator, torch.Tensor] | None = None
    _outputs: tuple[weakref.ref[Content], ...] = ()
    _kept: dict[Content, torch.UntypedStorage] | None = None
    _kept_back: dict[Content, torch.UntypedStorage] | None = None

    def __init__(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        reads: dict[Content, torch.UntypedStorage],
        cost: int,
        with_grad: bool,
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.reads = tuple(reads)
        self.cost = cost
        self.with_grad = with_grad
        reader = weakref.ref(self)
        for content in reads:
            content.add_reader(reader)
            if content.maker is None:
                self.keep(content, reads[content])

    @property
    def outputs(self) -> list[Content | None]:
        """Its results: the new contents of written storages, then new storages; None if gone."""
        return [ref() for ref in self._outputs]

    def made(self, contents: Sequence[Content]) -> None:
        self._outputs = tuple(map(weakref.ref, contents))

    def keep(self, content: Content, storage: torch.UntypedStorage) -> None:
        """Hold contents that it reads and that cannot be computed again."""
        if self._kept is None:
            self._kept = {}
        self._kept[content] = storage

    def keep_reads(self) -> None:
        """Hold inputs while a result is evicted, if they are not evicted themselves."""
        for content in self.reads:
            if content.is_resident and content.is_held and content not in (self._kept or ()):
                storage = content.memory
                if storage is not None:
                    if self._kept_back is None:
                        self._kept_back = {}
                    self._kept_back[content] = storage

    def release_reads(self) -> None:
        """Hold inputs no longer if no result needs them: it came back, or is not needed."""
        if self._kept_back:
            outputs = (output for output in self.outputs if output is not None)
            if all(output.is_resident or not output.is_held for output in outputs):
                self.forget_reads()

    def forget_reads(self) -> None:
        """Hold no inputs for its results."""
        self._kept_back = None

    def drop(self, content: Content) -> None:
        """Hold a content that it reads no longer: it has memory of its own now."""
        for kept in (self._kept, self._kept_back):
            if kept is not None:
                kept.pop(content, None)
