"""How many bytes a device's allocator has allocated, now and at most."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from tightfit.allocator.hook import hook_available, installed_hook
from tightfit.allocator.profiler_meter import ProfilerMeter
from tightfit.errors import BadInput, HookUnavailable, TightfitError

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")


class Meter(Protocol):
    """Reads one device's allocator.

    `live_bytes` and `peak_bytes` count bytes allocated, each request rounded as the device's
    allocator rounds. Only differences mean something: memory allocated before the meter existed may
    or may not be in them. Every meter has a peak of its own, which starts from the bytes live when
    the meter is made.
    """

    # Whether the device has one peak for all readers, which `reset_peak` takes from others
    shares_peak: bool

    def live_bytes(self) -> int:
        """Return the bytes allocated and not yet freed."""

    def peak_bytes(self) -> int:
        """Return the most that `live_bytes` was since the last `reset_peak` of this meter."""

    def reset_peak(self, *, quietly: bool = False) -> None:
        """Let this meter's peak start again from the bytes live now.

        `quietly`: leave a peak that is shared as it is. `peak_bytes` then is a lower bound of live
        bytes: it is exact where it is the highest since the shared peak was last reset.
        """

    def take_peak_bytes(self, *, quietly: bool = False) -> int:
        """Return the peak, and let it start again, as of `reset_peak`."""

    def held_bytes(self) -> int:
        """Return bytes that the process really holds: freed memory kept for later counts."""


class CpuMeter:
    """Counts the bytes asked from PyTorch's CPU allocator, by the allocator hook.

    Exact, from every thread, oneDNN's scratch memory included; requests are rounded up to 64
    bytes. Not seen: memory that MKL and OpenMP take for themselves. Each allocation costs a
    comparison per meter that exists.

    Raises `HookUnavailable` if the hook cannot be installed, or 1024 meters exist already.
    """

    shares_peak = False

    def __init__(self) -> None:
        self._hook = installed_hook()
        self._slot = self._hook.tightfit_hook_peak_open()
        if self._slot < 0:
            raise HookUnavailable(
                "1024 meters of the CPU's memory exist already: drop fitted models and meters "
                "that are no longer used"
            )
        weakref.finalize(self, self._hook.tightfit_hook_peak_close, self._slot).atexit = False

    def live_bytes(self) -> int:
        live_bytes = self._hook.tightfit_hook_live_bytes()
        if live_bytes < 0:
            raise MemoryError("the allocator hook ran out of memory: its counts are incomplete")
        return live_bytes

    def peak_bytes(self) -> int:
        return self._hook.tightfit_hook_peak_bytes(self._slot)

    def reset_peak(self, *, quietly: bool = False) -> None:
        """Let this meter's peak start again from the bytes live now; the meter has one user."""
        self._hook.tightfit_hook_peak_reset(self._slot)

    def take_peak_bytes(self, *, quietly: bool = False) -> int:
        return self._hook.tightfit_hook_peak_take(self._slot)

    def held_bytes(self) -> int:
        """Return the resident memory of the process."""
        return resident_bytes()


class CudaMeter:
    """Counts the bytes asked from PyTorch's CUDA allocator.

    Not by how much a block is larger than its request: up to 512 bytes, or up to 1 MiB where a kept
    block is used again. That depends on earlier frees and is counted by `held_bytes`. PyTorch has
    one peak per device, which is the user's, too: it is reset only where a meter's own is, and not
    quietly. Before a meter resets it, every meter of the device notes it. A
    ``torch.cuda.reset_peak_memory_stats`` of other code is noticed unless it goes by before the
    peak is read: of live bytes before it a lower bound is then known.
    """

    shares_peak = True
    _all: ClassVar[weakref.WeakSet[CudaMeter]] = weakref.WeakSet()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, device: torch.device) -> None:
        import torch

        self._cuda = torch.cuda
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._least_bytes = 0  # lower bound of live bytes since the last reset of this meter
        self._stale_bytes: int | None = None  # the shared peak, where it is older than that
        with self._lock:
            self._all.add(self)
        self.reset_peak(quietly=True)

    def live_bytes(self) -> int:
        """Return the bytes in live tensors and workspaces of the device."""
        return self._statistic("current")

    def peak_bytes(self) -> int:
        with self._lock:
            return self._known_bytes(self._statistic("peak"))

    def reset_peak(self, *, quietly: bool = False) -> None:
        with self._lock:
            peak_bytes, live_bytes = self._statistic("peak"), self._statistic("current")
            if quietly:
                self._least_bytes, self._stale_bytes = live_bytes, peak_bytes
                return
            for meter in self._all:
                if meter._index == self._index:
                    meter._least_bytes = meter._known_bytes(peak_bytes)
                    meter._stale_bytes = None
            self._least_bytes = 0
            self._cuda.reset_peak_memory_stats(self._index)

    def take_peak_bytes(self, *, quietly: bool = False) -> int:
        peak_bytes = self.peak_bytes()
        self.reset_peak(quietly=quietly)
        return peak_bytes

    def _known_bytes(self, peak_bytes: int) -> int:
        """Return this meter's peak, as far as it is known where the shared peak is so much."""
        if peak_bytes == self._stale_bytes:
            return max(self._least_bytes, self._statistic("current"))
        return max(self._least_bytes, peak_bytes)

    def asked_so_far_bytes(self) -> int:
        """Return the bytes of all requests so far, requests that are given back included."""
        return self._statistic("allocated")

    def _statistic(self, which: str) -> int:
        # other allocators than PyTorch's own do not count requested bytes
        is_native = self._cuda.get_allocator_backend() == "native"
        kind = "requested_bytes" if is_native else "allocated_bytes"
        return int(self._cuda.memory_stats(self._index).get(f"{kind}.all.{which}", 0))

    def held_bytes(self) -> int:
        """Return the bytes reserved by the caching allocator."""
        return self._cuda.memory_reserved(self._index)


@dataclass(frozen=True)
class PeakMeasurement:
    """The effect of one call on a device's memory."""

    peak_bytes: int  # the most that was live during the call above bytes live before it
    growth_bytes: int  # live bytes after the call minus those before it; may be negative


def meter_for(device: torch.device | str) -> Meter:
    """Return the meter of a device.

    Raises `HookUnavailable` for the CPU if the hook cannot be installed; only `measure_peak` works
    then. Raises `BadInput` if the device is neither a CPU nor a CUDA device.
    """
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        return CpuMeter()
    if device.type == "cuda":
        return CudaMeter(device)
    raise BadInput(f"memory can be metered on 'cpu' and 'cuda' devices, not on {device.type!r}")


def own_meter_for(device: torch.device | str) -> Meter | None:
    """Return a meter whose peak no other code reads; None where there is none."""
    try:
        meter = meter_for(device)
    except TightfitError:
        return None
    return None if meter.shares_peak else meter


def measure_peak(
    function: Callable[[], Result], *, device: torch.device | str = "cpu"
) -> tuple[Result, PeakMeasurement]:
    """Call a function and measure its peak, with or without the allocator hook.

    A meter of the device is used where there can be one; else the call runs under PyTorch's
    profiler, which is slower and counts only the calling thread's memory. Python's collector of
    cycles rests meanwhile: garbage of earlier work is not the call's.
    """
    import torch

    with _without_collection():
        return _measure_peak(function, torch.device(device))


def _measure_peak(
    function: Callable[[], Result], device: torch.device
) -> tuple[Result, PeakMeasurement]:
    if device.type == "cpu" and not hook_available():
        with ProfilerMeter() as profiler:
            result = function()
        return result, PeakMeasurement(profiler.peak_bytes(), profiler.live_bytes())
    meter = meter_for(device)
    meter.reset_peak()
    before = meter.live_bytes()
    result = function()
    return result, PeakMeasurement(meter.peak_bytes() - before, meter.live_bytes() - before)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def cuda_requests() -> int:
    """Return how many blocks CUDA's allocator has allocated so far, of all devices."""
    import torch

    if not torch.cuda.is_initialized():
        return 0
    counts = (torch.cuda.memory_stats(n) for n in range(torch.cuda.device_count()))
    return sum(int(each.get("allocation.all.allocated", 0)) for each in counts)


def resident_bytes() -> int:
    """Return the resident memory of this process, as Linux counts it."""
    return _pages(1)


def code_bytes() -> int:
    """Return resident bytes of files mapped into the process: code of libraries, above all."""
    return _pages(2)


def anonymous_bytes() -> int:
    """Return resident bytes that are not of files: they cannot be read again from a disk."""
    return _pages(1, less=2)


def _pages(column: int, less: int | None = None) -> int:
    pages = list(map(int, Path("/proc/self/statm").read_text().split()))
    count = pages[column] - (0 if less is None else pages[less])
    return count * os.sysconf("SC_PAGE_SIZE")
