"""The streams of a GPU played on the CPU: copies run as late, or as early, as their order allows.

Operators run at once. A copy runs when a wait forces it, or when `choose` says so. Three mistakes
are found: memory freed or reused under a copy, places of far memory that two copies use in no
order, and copies that do not wait for the operators before them. A value that is read before it is
there has wrong bits.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tightfit.execution.far.pinned import PinnedMemory, PinnedStep

_UNDEFINED = 0xCD  # in memory that a load has not filled yet

Clock = dict[str, int]


def at_random(seed: int) -> Callable[[int], int]:
    """Let a random number of the copies that wait run at each moment."""
    draw = random.Random(seed)
    return lambda waiting: draw.randint(0, waiting)


ORDERS: dict[str, Callable[[int], int]] = {
    "late": lambda waiting: 0,
    "early": lambda waiting: waiting,
}


@dataclass(eq=False)
class _Event:
    stream: str
    clock: Clock  # how much of each stream has run when it has
    has_run: bool = False


@dataclass(frozen=True)
class _Access:
    """A copy's use of a part of pinned memory."""

    begin: int
    end: int
    stream: str
    number: int
    writes: bool


@dataclass
class LateStreams:
    """See `Streams` (`tightfit.execution.far.pinned`).

    `choose`: how many of so many queued requests run now. `ignored`: pairs of a stream and another
    whose events it does not wait for: a mistake, which is to be found.
    """

    choose: Callable[[int], int] = ORDERS["late"]
    ignored: Collection[tuple[str, str]] = ()
    now: str = "operators"  # the current stream
    copies: int = 0
    refused_copy: int | None = None  # the number of the copy that fails
    can_pin: bool = True
    stores: str = "stores"
    loads: str = "loads"
    _clocks: defaultdict[str, Clock] = field(default_factory=lambda: defaultdict(dict))
    _queues: dict[str, deque[Any]] = field(default_factory=dict)
    _chunks: list[tuple[int, int]] = field(default_factory=list)
    _accesses: list[_Access] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._queues = {self.stores: deque(), self.loads: deque()}

    def current(self) -> str:
        return self.now

    def tick(self) -> None:
        """Operators may have run since."""
        own = self._clocks[self.now]
        own[self.now] = own.get(self.now, 0) + 1

    def mark(self, stream: str, *, is_timed: bool = False) -> _Event:
        event = _Event(stream, dict(self._clocks[stream]), stream not in self._queues)
        if not event.has_run:
            self._queues[stream].append(event)
        self._run_some()
        return event

    def wait(self, stream: str, event: _Event) -> None:
        if (stream, event.stream) in self.ignored:
            return
        own = self._clocks[stream]
        for other, number in event.clock.items():
            own[other] = max(own.get(other, 0), number)
        if stream in self._queues:
            self._queues[stream].append(partial(self._run_until, event))
        else:
            self._run_until(event)
        self._run_some()

    def copy(self, stream: str, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copies += 1
        if self.copies == self.refused_copy:
            raise RuntimeError("a copy that fails")
        own = self._clocks[stream]
        own[stream] = own.get(stream, 0) + 1
        assert own.get(self.now, 0) == self._clocks[self.now].get(self.now, 0), (
            "a copy does not wait for the operators before it"
        )
        self._note(stream, target, writes=True)
        self._note(stream, source, writes=False)
        if stream == self.loads:
            target.fill_(_UNDEFINED)
        self._queues[stream].append(partial(_copied, self._held(target), self._held(source)))
        self._run_some()

    def pinned(self, size: int) -> torch.Tensor:
        if not self.can_pin:
            raise RuntimeError("CUDA error: out of memory\nmore of it")
        memory = torch.empty(size, dtype=torch.uint8)
        self._chunks.append((memory.data_ptr(), memory.data_ptr() + size))
        return memory

    def seconds(self, begin: _Event, end: _Event) -> float | None:
        return 1e-3 if not any(self._queues.values()) else None

    def run_all(self) -> None:
        """Run every copy that waits."""
        for stream, queue in self._queues.items():
            while queue:
                self._advance(stream)

    def _note(self, stream: str, memory: torch.Tensor, *, writes: bool) -> None:
        """Note a use of pinned memory; fail if another is in no order with it."""
        if not self._is_pinned(memory):
            return
        begin = memory.data_ptr()
        mine = _Access(begin, begin + len(memory), stream, self._clocks[stream][stream], writes)
        for other in self._accesses:
            overlaps = other.begin < mine.end and mine.begin < other.end
            is_before = other.number <= self._clocks[stream].get(other.stream, 0)
            if overlaps and (writes or other.writes):
                assert is_before, "two copies use one place of far memory in no order"
        if writes:  # what is in order with this is in order with those before it
            inside = [o for o in self._accesses if begin <= o.begin and o.end <= mine.end]
            self._accesses = [o for o in self._accesses if o not in inside]
        self._accesses.append(mine)

    def _is_pinned(self, memory: torch.Tensor) -> bool:
        return any(begin <= memory.data_ptr() < end for begin, end in self._chunks)

    def _held(self, memory: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that returns memory; a copy in flight does not keep a GPU's alive."""
        if self._is_pinned(memory):
            return lambda: memory
        weak = StorageWeakRef(memory.untyped_storage())
        return partial(_alive, weak, int(memory.storage_offset()), len(memory))

    def _run_some(self) -> None:
        waiting = [stream for stream, queue in self._queues.items() for _ in queue]
        for stream in waiting[: self.choose(len(waiting))] if waiting else ():
            if self._queues[stream]:
                self._advance(stream)

    def _advance(self, stream: str) -> None:
        first = self._queues[stream].popleft()
        if isinstance(first, _Event):
            first.has_run = True
        else:
            first()

    def _run_until(self, event: _Event) -> None:
        while not event.has_run:
            self._advance(event.stream)


def _copied(target: Callable[[], torch.Tensor], source: Callable[[], torch.Tensor]) -> None:
    target().copy_(source())


def _alive(weak: StorageWeakRef, offset: int, length: int) -> torch.Tensor:
    assert not weak.expired(), "memory was freed while a copy used it"
    storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    return torch.empty(0, dtype=torch.uint8).set_(storage, offset, (length,))


class WatchedStep(PinnedStep):
    """A step of whose requests each comes after further operators."""

    def __init__(self, memory: PinnedMemory) -> None:
        super().__init__(memory)
        self.streams: Any = memory.streams

    def store(self, value: int, tensor: torch.Tensor) -> None:
        self.streams.tick()
        super().store(value, tensor)

    def load(self, value: int, *, is_last: bool = False) -> torch.Tensor:
        self.streams.tick()
        return super().load(value, is_last=is_last)

    def wait(self, value: int) -> None:
        self.streams.tick()
        super().wait(value)


def pinned_memory(size: int, streams: LateStreams, chunk_bytes: int = 4096) -> PinnedMemory:
    """Return far memory whose chunks are so small that one value takes several."""
    memory = PinnedMemory(size, streams)
    memory.chunk_bytes = chunk_bytes
    return memory
