"""A step measured while it runs: what ends when, what kernels take, what lies beside."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from time import thread_time_ns

import torch

from tightfit.dynamic.history import Content
from tightfit.dynamic.learned.running import RunningStep
from tightfit.dynamic.learned.trace import OVERWRITTEN, Made, Trace
from tightfit.dynamic.ledger import Ledger
from tightfit.dynamic.room import Room, allocated_bytes

__all__ = ["Recording"]

_SAMPLED_EVERY = 16  # operators


class _End(weakref.ref[torch.UntypedStorage]):
    """A storage, held weakly, and which content lies in it last."""

    __slots__ = ("number",)
    number: int

    def holds(self, number: int) -> _End:
        """Say what lies in it now."""
        self.number = number
        return self


class _Kernel:
    """What an operator takes of memory and of the processor, as if nothing were evicted meanwhile.

    Parameters
    ----------
    room : Room
        Where bytes are counted.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._before_bytes = self._freed_bytes = self._most_bytes = 0
        self._started_ns = 0

    @property
    def held_bytes(self) -> int:
        """What is held now."""
        return self._room.held_bytes

    def starts(self) -> None:
        """It runs from now on."""
        self._room.take_recent_peak_bytes()
        self._before_bytes = self._room.held_bytes
        self._freed_bytes = self._most_bytes = 0
        self._started_ns = thread_time_ns()

    def evicting(self, evict: Callable[[], bool]) -> bool:
        """Evict while it runs."""
        started_ns, before_bytes = thread_time_ns(), self._room.held_bytes
        self._note()
        found = evict()
        self._room.take_recent_peak_bytes()
        self._freed_bytes += max(0, before_bytes - self._room.held_bytes)
        self._started_ns += thread_time_ns() - started_ns
        return found

    def taken(self) -> tuple[int, int]:
        """Return the nanoseconds and the most bytes that it has taken so far."""
        cpu_ns = thread_time_ns() - self._started_ns
        self._note()
        return cpu_ns, self._most_bytes - self._before_bytes

    def _note(self) -> None:
        recent_bytes = self._room.take_recent_peak_bytes()
        self._most_bytes = max(self._most_bytes, recent_bytes + self._freed_bytes)


class Recording:
    """Measures a running step, and writes it down.

    Parameters
    ----------
    step : RunningStep
        As far as it has come: to its beginning.
    room : Room
        Where bytes are counted.
    ledger : Ledger
        Where is counted what runs again.
    smallest_bytes : int
        Smaller contents are never evicted: they lie beside.
    """

    def __init__(self, step: RunningStep, room: Room, ledger: Ledger, smallest_bytes: int) -> None:
        self._step = step
        self._ledger = ledger
        self._smallest_bytes = smallest_bytes
        self._kernel = _Kernel(room)
        self._storages: dict[int, _End] = {}
        self._valued: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._settled: list[tuple[int, int]] = []
        self._taken: list[tuple[int, int]] = []
        self._beside: list[tuple[int, int]] = []
        self._before = ledger.counts()

    def starts(self) -> None:
        """A kernel is about to run."""
        position = self._step.position
        if not position % _SAMPLED_EVERY:
            self._beside.append((position, self._kernel.held_bytes - self._evictable_bytes()))
        self._kernel.starts()

    def evicting(self, evict: Callable[[], bool]) -> bool:
        """Evict, maybe while a kernel runs."""
        return self._kernel.evicting(evict)

    def made(self, made: Sequence[Made], storages: Sequence[torch.UntypedStorage]) -> None:
        """The kernel has run and has made something, in these storages."""
        cpu_ns, taken_bytes = self._kernel.taken()
        for each, storage in zip(made, storages, strict=True):
            number, over = each.number, each.over
            if over < 0:
                taken_bytes -= allocated_bytes(storage)
                self._storages[number] = _End(storage, self._ended).holds(number)
            elif over in self._storages:
                self._storages[number] = self._storages.pop(over).holds(number)
                self._ends[over] = OVERWRITTEN
            if over < 0 or each.repeats or over in self._valued:
                self._valued[number] = each.size_bytes
        self._taken.append((cpu_ns, max(0, taken_bytes)))

    def settles(self, content: Content) -> None:
        """A content stays from now on."""
        number = self._step.number_of(content)
        if number is not None:
            self._settled.append((self._step.position, number))

    def trace(self) -> Trace:
        """Return the step as it ran."""
        step, counts = self._step, self._ledger.counts()
        numbers = [m.number for each in (step.met, *step.made) for m in each]
        return Trace(
            asked=tuple(step.asked),
            made=tuple(step.made),
            met=tuple(step.met),
            ends=tuple(self._ends.get(number, step.position) for number in sorted(numbers)),
            settled=tuple(self._settled),
            cost_ns=tuple(ns for ns, _ in self._taken),
            workspace_bytes=tuple(size for _, size in self._taken),
            beside_bytes=tuple(self._beside),
            again_ns=counts.again_ns - self._before.again_ns,
            again=counts.again - self._before.again,
        )

    def _ended(self, end: weakref.ref[torch.UntypedStorage]) -> None:
        """The program holds a storage no longer."""
        assert isinstance(end, _End)
        if self._storages.pop(end.number, None) is not None:
            self._ends[end.number] = self._step.position

    def _evictable_bytes(self) -> int:
        """What of the step's own contents is there now and large enough to be evicted."""
        found = 0
        for number, size_bytes in self._valued.items():
            content = self._step.content(number)
            if content is not None and content.is_resident and size_bytes >= self._smallest_bytes:
                found += size_bytes
        return found
