"""Recording the lifetime of every block that PyTorch's CPU allocator gives out."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from tightfit.allocator.hook import installed_hook


class RecordedBlock(NamedTuple):
    """One lifetime of one allocation.

    `lower` and `upper` are ticks: a counter that starts at 1 and grows by one at every allocation
    and at every free of a recorded block. The block is alive in ``[lower, upper)``. `size_bytes` is
    the requested size, not rounded. `thread` numbers the allocating thread, 0 being the thread that
    started the recording; -1: that thread had interrupted its arena.
    """

    id: int
    lower: int
    upper: int
    size_bytes: int
    thread: int


@dataclass(frozen=True)
class Recording:
    """Every block that was allocated between begin and end of a recording."""

    blocks: tuple[RecordedBlock, ...]  # in order of allocation; ``blocks[i].id == i``
    last_tick: int  # the end of every block that outlived the recording
    # How many blocks were freed that were allocated before the recording began
    frees_of_older_blocks: int


class Recorder:
    """Holds the recording once it has ended."""

    def __init__(self) -> None:
        self._recording: Recording | None = None

    @property
    def recording(self) -> Recording:
        """The finished recording.

        Raises `RuntimeError` while it still runs.
        """
        if self._recording is None:
            raise RuntimeError("a recording can be read only after its 'with' block has ended")
        return self._recording


@contextmanager
def record() -> Iterator[Recorder]:
    """Record the blocks allocated in a ``with`` block, by any thread.

    ::

        with record() as recorder:
            step()
        recorder.recording.blocks

    Python's cyclic garbage collector may delay frees; disable it around the block for lifetimes
    that repeat from step to step.

    Raises `HookUnavailable` if the allocator hook cannot be installed. Raises `RuntimeError` if
    another recording is running.
    """
    hook = installed_hook()
    if hook.tightfit_hook_record_begin():
        raise RuntimeError("another recording is running: recordings cannot be nested")
    recorder = Recorder()
    try:
        yield recorder
    finally:
        recorder._recording = _finish(hook)


def _finish(hook: ctypes.CDLL) -> Recording:
    last_tick, older = ctypes.c_int64(), ctypes.c_int64()
    count = hook.tightfit_hook_record_end(ctypes.byref(last_tick), ctypes.byref(older))
    if hook.tightfit_hook_lost_blocks():
        raise MemoryError("the allocator hook ran out of memory: the recording is incomplete")
    rows = (ctypes.c_int64 * (4 * count))()
    hook.tightfit_hook_record_read(rows)
    cells = iter(rows)
    blocks = tuple(
        RecordedBlock(id, lower, upper or last_tick.value, size, thread)
        for id, (lower, upper, size, thread) in enumerate(
            zip(cells, cells, cells, cells, strict=True)
        )
    )
    return Recording(blocks, last_tick.value, older.value)
