"""A thread that copies values to and from far memory, one after the other."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tightfit.errors import OffloadFailed
from tightfit.execution.far.space import Extent

Copy: TypeAlias = Callable[[memoryview, int], int]
"""Copies a piece of memory to or from a place in a file; returns how many bytes it has copied."""

_PIECE_BYTES = 16 << 20  # after which a copy may be broken off
_LOOKS_S = 1.0  # how often a waiting thread looks whether the copier is alive


class Transfer:
    """One value on its way.

    `memory`: its bytes; freed when the copy has ended. `extents`: their places in the file.
    """

    def __init__(self, memory: memoryview, extents: Sequence[Extent]) -> None:
        self.extents = tuple(extents)
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._memory: memoryview | None = memory

    def run(self, copy: Copy, is_broken_off: Callable[[], bool]) -> None:
        """Copy; an error is kept for the thread that waits."""
        assert self._memory is not None
        begin = 0
        try:
            for place, size in self.extents:
                _copy_extent(copy, self._memory[begin : begin + size], place, is_broken_off)
                begin += size
        except BaseException as error:
            error.__traceback__ = None  # whose frames hold the memory
            self.error = error
        self.end()

    def end(self) -> None:
        """Free the memory, then say that it has ended."""
        if self._memory is not None:
            self._memory.release()
        self._memory = None
        self.ended.set()


def writing(file: int) -> Copy:
    """Return a function that copies memory to a file."""
    return lambda memory, place: os.pwrite(file, memory, place)


def reading(file: int) -> Copy:
    """Return a function that copies a file to memory."""
    return lambda memory, place: os.preadv(file, [memory], place)


def _copy_extent(
    copy: Copy, memory: memoryview, place: int, is_broken_off: Callable[[], bool]
) -> None:
    done = 0
    while done < len(memory) and not is_broken_off():
        copied = copy(memory[done : done + _PIECE_BYTES], place + done)
        if copied <= 0:
            raise OSError("the file is shorter than the values stored in it")
        done += copied


class Copier:
    """A thread that copies in one direction, in the order in which it is asked.

    `copy`: copies a piece.
    """

    def __init__(self, copy: Copy, name: str) -> None:
        self._transfers: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._broken_off = threading.Event()
        args = (self._transfers, copy, self._broken_off.is_set)
        self._thread = threading.Thread(target=_serve, args=args, name=name, daemon=True)
        self._thread.start()
        _CLOCKS.begin(self._thread)

    def begin(self, memory: memoryview, extents: Sequence[Extent]) -> Transfer:
        transfer = Transfer(memory, extents)
        self._transfers.put(transfer)
        return transfer

    def wait(self, transfer: Transfer) -> None:
        """Return once a copy has ended.

        Raises `OffloadFailed` if the thread has ended without it.
        """
        while not transfer.ended.wait(_LOOKS_S):
            if not self._thread.is_alive():
                raise OffloadFailed(
                    "the thread that copies to and from far memory has ended during a step: the "
                    "step is dropped, parameters are as before it. Run the step again"
                )

    def close(self) -> None:
        """Break off the current copy, drop the rest, and end the thread."""
        self._broken_off.set()
        self._transfers.put(None)
        if self._thread is not threading.current_thread():  # where garbage is collected
            _CLOCKS.end(self._thread)
            self._thread.join()


def _serve(
    transfers: queue.SimpleQueue[Transfer | None], copy: Copy, is_broken_off: Callable[[], bool]
) -> None:
    while (transfer := transfers.get()) is not None:
        transfer.run(copy, is_broken_off)
        del transfer


class _Clocks:
    """The processor time of all threads that copy."""

    def __init__(self) -> None:
        self._running: list[threading.Thread] = []
        self._ended_s = 0.0
        self._lock = threading.Lock()

    def begin(self, thread: threading.Thread) -> None:
        with self._lock:
            self._running.append(thread)

    def end(self, thread: threading.Thread) -> None:
        """Count a thread no longer: it is about to end."""
        with self._lock:
            if thread in self._running:
                self._running.remove(thread)
                self._ended_s += _cpu_s(thread)

    def now_s(self) -> float:
        with self._lock:
            return self._ended_s + sum(map(_cpu_s, self._running))


_CLOCKS = _Clocks()


def _cpu_s(thread: threading.Thread) -> float:
    if thread.ident is None or not thread.is_alive() or not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def copying_cpu_s() -> float:
    """Return the processor time that copying has taken in this process."""
    return _CLOCKS.now_s()
