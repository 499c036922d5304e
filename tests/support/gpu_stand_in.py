"""A GPU's allocator played by the CPU's: PyTorch's limit, its error, its statistics."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from tightfit.allocator import CpuMeter
from tightfit.allocator.refusals import is_refusal, refused_bytes
from tightfit.allocator.tally import CpuTally, CudaTally
from tightfit.dynamic.room import CudaRoom
from tightfit.dynamic.runtime import Runtime
from tightfit.torch_private.gpu import allocator_settings

Result = TypeVar("Result")

_TOTAL_BYTES = 80 << 30
_OTHERS_BYTES = 1 << 30  # reserved by other code, so that it is more than what is allocated


class _Allocator:
    """What torch.cuda tells, and does, of memory."""

    def __init__(self) -> None:
        self._meter, self._asked = CpuMeter(), CpuMeter()
        self._asked_bytes = 0
        self._fraction = 1.0
        self._tally = CpuTally()
        self._start_bytes = self._meter.live_bytes()

    def memory_stats(self, index: int) -> dict[str, int]:
        """Return statistics; what was asked for counts by the peaks between."""
        live_bytes = self._meter.live_bytes()
        self._asked_bytes += max(0, self._asked.peak_bytes() - live_bytes)
        self._asked.reset_peak()
        return {
            "requested_bytes.all.current": live_bytes,
            "requested_bytes.all.peak": self._meter.peak_bytes(),
            "requested_bytes.all.allocated": self._asked_bytes,
        }

    def reset_peak_memory_stats(self, index: int) -> None:
        self._meter.reset_peak()

    def memory_reserved(self, index: int) -> int:
        return self._meter.live_bytes() + _OTHERS_BYTES

    def get_per_process_memory_fraction(self, index: int) -> float:
        return self._fraction

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        self._fraction = fraction
        allowed_bytes = int(fraction * _TOTAL_BYTES) - _OTHERS_BYTES - self._start_bytes
        self._tally.set_limit(None if fraction == 1 else allowed_bytes, 0)

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(total_memory=_TOTAL_BYTES)

    def get_allocator_backend(self) -> str:
        return "native"

    def empty_cache(self) -> None:
        """Nothing is cached."""


class RoomOnStandIn(CudaRoom):
    """The room of a GPU for tensors on the CPU."""

    def in_room(self, attempt: Callable[[], Result]) -> Result:
        return super().in_room(lambda: _as_on_a_gpu(attempt))

    def _new_tally(self) -> CudaTally:
        return CudaTally(torch.device("cuda:0"), (), restarts_peak=True)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch.cuda tell of the CPU's memory, and refuse as a GPU does."""
    allocator = _Allocator()
    for name in dir(allocator):
        if not name.startswith("_"):
            monkeypatch.setattr(torch.cuda, name, getattr(allocator, name))
    monkeypatch.setitem(allocator_settings._ours, "may expand", False)
    timed = Runtime._timed

    def failing_as_on_a_gpu(self: Runtime, *args: Any) -> Any:
        return _as_on_a_gpu(lambda: timed(self, *args))

    monkeypatch.setattr(Runtime, "_timed", failing_as_on_a_gpu)


def _as_on_a_gpu(run: Callable[[], Result]) -> Result:
    try:
        return run()
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or not is_refusal(error):
            raise
        asked = refused_bytes(error)[1]
        size = f"{asked / 2**20:.2f} MiB" if asked >= 2**20 else f"{asked / 2**10:.2f} KiB"
        text = f"CUDA out of memory. Tried to allocate {size}. GPU 0 has a total capacity of"
        raise torch.OutOfMemoryError(text) from None
