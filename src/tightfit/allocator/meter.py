"""How many bytes a device's allocator has given out, now and at most."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from tightfit.allocator.library import hook_available, installed_hook
from tightfit.allocator.profiler_meter import ProfilerMeter
from tightfit.errors import BadInput

if TYPE_CHECKING:
    import torch

__all__ = [
    "CpuMeter",
    "CudaMeter",
    "Meter",
    "PeakMeasurement",
    "measure_peak",
    "meter_for",
    "resident_bytes",
]

Result = TypeVar("Result")


class Meter(Protocol):
    """Reads one device's allocator.

    `live_bytes` and `peak_bytes` count bytes given out, each request rounded as the device's
    allocator rounds. Only differences mean something: what the process allocated before the
    meter existed may or may not be in them.
    """

    def live_bytes(self) -> int:
        """Return the bytes given out and not yet freed."""
        ...

    def peak_bytes(self) -> int:
        """Return the most that `live_bytes` was since the last `reset_peak`."""
        ...

    def reset_peak(self) -> None:
        """Let the peak start again from what is live now."""
        ...

    def held_bytes(self) -> int:
        """Return what the process really holds: freed memory that is kept for later counts."""
        ...


class CpuMeter:
    """Counts the bytes asked from PyTorch's CPU allocator, by the allocator hook.

    Exact, from every thread, oneDNN's scratch memory included; requests are rounded up to 64
    bytes. Not seen: memory that MKL and OpenMP take for themselves. There is one peak per
    process: a `reset_peak` is seen by every meter.

    Raises
    ------
    HookUnavailable
        If the hook cannot be installed.
    """

    def __init__(self) -> None:
        self._hook = installed_hook()

    def live_bytes(self) -> int:
        """Return the bytes given out since the hook was installed and not yet freed."""
        if self._hook.tightfit_hook_lost_blocks():
            raise MemoryError("the allocator hook ran out of memory: its counts are incomplete")
        return int(self._hook.tightfit_hook_live_bytes())

    def peak_bytes(self) -> int:
        """Return the most that `live_bytes` was since the last `reset_peak`."""
        return int(self._hook.tightfit_hook_peak_bytes())

    def reset_peak(self) -> None:
        """Let the peak start again from what is live now."""
        self._hook.tightfit_hook_reset_peak()

    def held_bytes(self) -> int:
        """Return the resident memory of the process."""
        return resident_bytes()


class CudaMeter:
    """Counts the bytes asked from PyTorch's CUDA allocator, rounded up to 512 bytes."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._cuda = torch.cuda

    def live_bytes(self) -> int:
        """Return the bytes in live tensors and workspaces of the device."""
        return self._cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        """Return the most that `live_bytes` was since the last `reset_peak`."""
        return self._cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        """Let the peak start again from what is live now."""
        self._cuda.reset_peak_memory_stats(self._device)

    def held_bytes(self) -> int:
        """Return the bytes reserved by the caching allocator."""
        return self._cuda.memory_reserved(self._device)


@dataclass(frozen=True)
class PeakMeasurement:
    """What one call did to a device's memory.

    Parameters
    ----------
    peak_bytes : int
        The most that was live during the call above what was live before it.
    growth_bytes : int
        What is live after the call minus what was live before it; may be negative.
    """

    peak_bytes: int
    growth_bytes: int


def meter_for(device: torch.device | str) -> Meter:
    """Return the meter of a device.

    Raises
    ------
    HookUnavailable
        For the CPU if the hook cannot be installed; only `measure_peak` works then.
    BadInput
        If the device is neither a CPU nor a CUDA device.
    """
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        return CpuMeter()
    if device.type == "cuda":
        return CudaMeter(device)
    raise BadInput(f"memory can be metered on 'cpu' and 'cuda' devices, not on {device.type!r}")


def measure_peak(
    function: Callable[[], Result], *, device: torch.device | str = "cpu"
) -> tuple[Result, PeakMeasurement]:
    """Call a function and measure its peak, with or without the allocator hook.

    The device's meter is used where there is one (its peak is reset); else the call runs under
    PyTorch's profiler, which is slower and counts only the calling thread's memory.
    """
    import torch

    if torch.device(device).type == "cpu" and not hook_available():
        with ProfilerMeter() as profiler:
            result = function()
        return result, PeakMeasurement(profiler.peak_bytes(), profiler.live_bytes())
    meter = meter_for(device)
    before = meter.live_bytes()
    meter.reset_peak()
    result = function()
    return result, PeakMeasurement(meter.peak_bytes() - before, meter.live_bytes() - before)


def resident_bytes() -> int:
    """Return the resident memory of this process, as Linux counts it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
