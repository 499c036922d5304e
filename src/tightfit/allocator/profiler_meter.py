"""Counting bytes without the hook, from the memory events of PyTorch's profiler."""

from __future__ import annotations

import itertools
from types import TracebackType
from typing import Any

from tightfit.units import rounded_up

_GRANULARITY_BYTES = 64


class ProfilerMeter:
    """Counts the CPU bytes that one block of code asks for; readable after the block.

    ::

        with ProfilerMeter() as meter:
            step()
        meter.peak_bytes()

    All figures are relative to the live bytes when the block began. Unlike `CpuMeter` it cannot be
    read while the code runs, and it is slow. It misses the free of memory that was allocated before
    the block: its figures are too high then. It does not see memory that worker threads ask for
    (such as the backward of flash attention with several threads).
    """

    def __init__(self) -> None:
        self._profiler: Any = None
        self._levels: tuple[int, ...] | None = None

    def __enter__(self) -> ProfilerMeter:
        import torch

        self._levels = None
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )
        self._profiler.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._profiler.__exit__(kind, error, trace)
        changes = _cpu_memory_changes(self._profiler)
        self._profiler = None
        self._levels = tuple(itertools.accumulate(changes, initial=0))

    def peak_bytes(self) -> int:
        """Return the most that was live in the block above the live bytes at its begin."""
        return max(self._read_levels())

    def live_bytes(self) -> int:
        """Return the live bytes at the block's end minus those at its begin."""
        return self._read_levels()[-1]

    def _read_levels(self) -> tuple[int, ...]:
        if self._levels is None:
            raise RuntimeError("a ProfilerMeter can be read only after its 'with' block has ended")
        return self._levels


def _cpu_memory_changes(profiler: Any) -> list[int]:
    """Return the rounded size of every CPU allocation (+) and free (-) in order of time."""
    from tightfit.torch_private.profiler import allocations

    return [_rounded(size) for device, size in allocations(profiler) if device == "cpu"]


def _rounded(size_bytes: int) -> int:
    sign = 1 if size_bytes >= 0 else -1
    return sign * rounded_up(abs(size_bytes), _GRANULARITY_BYTES)
