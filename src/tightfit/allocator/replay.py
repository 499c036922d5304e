"""Arenas of PyTorch's CPU allocator: the k-th request of a step gets its planned place."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain

from tightfit.allocator.hook import installed_hook
from tightfit.errors import BadInput

_PAGE_BYTES = 4096
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
_LARGE_BYTES = 256 << 10  # blocks that have a mapping of their own while they are to be returned
_LARGEST_BYTES = 32 << 20  # as high as glibc itself sets its threshold


@dataclass(frozen=True)
class Replayed:
    """Where requests of one step were served."""

    requests: int  # of the thread inside the arena
    hits: int  # got their planned place
    outside: int  # were planned to be outside
    # larger, late, over: fell back to the ordinary allocator: larger than planned; their place was
    # still held; more than there were in the plan
    larger: int
    late: int
    over: int

    @property
    def fallbacks(self) -> int:
        """Requests that were planned for the arena, or not at all, and are outside."""
        return self.larger + self.late + self.over


class Replay:
    """One mapping of memory, and plans of the offset of each request of a step.

    Blocks may outlive their step, and the arena: its pages are given back when the object is gone
    and nothing in them is alive.

    Raises `HookUnavailable` if the allocator hook cannot be installed. Raises `BadInput` if there
    are too many arenas. Raises `MemoryError` if the memory cannot be mapped.
    """

    def __init__(self, height_bytes: int) -> None:
        self._hook = installed_hook()
        self.height_bytes = -(-max(1, height_bytes) // _PAGE_BYTES) * _PAGE_BYTES
        self._number = self._hook.tightfit_replay_open(self.height_bytes)
        if self._number == -1:
            raise BadInput("64 arenas exist already: close some, or free their tensors")
        if self._number < 0:
            raise MemoryError(f"an arena of {self.height_bytes} bytes cannot be mapped")
        self._close = weakref.finalize(self, self._hook.tightfit_replay_close, self._number)
        self._close.atexit = False

    def add(
        self, sizes: Sequence[int], offsets: Sequence[int], predecessors: Sequence[Sequence[int]]
    ) -> int | None:
        """Add a plan and return its number; None if the arena has its 32 plans.

        `sizes`, `offsets`: of each request of a step, in order; offset -1: it is outside.
        `predecessors`: of each request, as `tightfit.layout.predecessors` returns them.
        """
        starts = [0, *accumulate(map(len, predecessors))]
        flat = list(chain.from_iterable(predecessors))
        number = self._hook.tightfit_replay_add(
            self._number,
            len(sizes),
            (ctypes.c_int64 * len(sizes))(*sizes),
            (ctypes.c_int64 * len(sizes))(*offsets),
            (ctypes.c_int64 * len(starts))(*starts),
            (ctypes.c_int32 * len(flat))(*flat),
        )
        if number < -1:
            raise MemoryError("the allocator hook has no memory for a plan")
        return None if number < 0 else number

    def begin(self, plan: int) -> None:
        """Serve the calling thread's requests as a step of a plan.

        Raises `BadInput` if the thread is in an arena already.
        """
        if self._hook.tightfit_replay_begin(self._number, plan):
            raise BadInput("this thread is in an arena already: arenas cannot be nested")

    def end(self) -> Replayed:
        """Leave the arena and return counts since `begin`."""
        numbers = (ctypes.c_int64 * 6)()
        self._hook.tightfit_replay_end(numbers)
        return Replayed(*numbers)

    @property
    def alive(self) -> int:
        """How many blocks are in the arena now."""
        return int(self._hook.tightfit_replay_alive(self._number))

    @property
    def resident_bytes(self) -> int:
        """Bytes of its pages that are in memory now."""
        return int(self._hook.tightfit_replay_resident(self._number))

    def drop_pages(self) -> None:
        """Give the pages back that no living block touches, while no step is inside."""
        self._hook.tightfit_replay_drop_pages(self._number)

    def wanted(self, plan: int, count: int) -> list[int]:
        """Return for each of a plan's requests the largest seen that was larger than planned."""
        sizes = (ctypes.c_int64 * count)()
        self._hook.tightfit_replay_wanted(self._number, plan, sizes)
        return list(sizes)

    def close(self) -> None:
        """Give the pages back, once nothing in them is alive."""
        self._close()


@contextmanager
def interrupted() -> Iterator[None]:
    """Let the requests of the calling thread belong to no step in a ``with`` block."""
    hook = installed_hook()
    hook.tightfit_replay_interrupt()
    try:
        yield
    finally:
        hook.tightfit_replay_resume()


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill the blocks of arenas with NaNs when they are taken and given back: for tests."""
    hook = installed_hook()
    hook.tightfit_replay_poison(1)
    try:
        yield
    finally:
        hook.tightfit_replay_poison(0)


def trim_ordinary_memory() -> None:
    """Let the C library give free pages back to the system, where it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def return_large_blocks_at_once(on: bool) -> None:
    """Let the C library give each large block back to the system as soon as it is freed, or not.

    Resident memory then follows live memory, at the price of page faults. Off: blocks of up to
    32 MiB are kept for reuse, which is where glibc ends by itself in a training loop. Does nothing
    where the C library has no such switch.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None:
        option(_MMAP_THRESHOLD, _LARGE_BYTES if on else _LARGEST_BYTES)
        option(_TRIM_THRESHOLD, _LARGE_BYTES if on else 2 * _LARGEST_BYTES)
