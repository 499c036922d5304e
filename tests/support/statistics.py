"""Statistics of a GPU's allocator that are those of the CPU's: one peak, for all who ask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tightfit.allocator import CpuMeter, CudaMeter, Meter
from tightfit.execution import guard as guarding


class OnePeak:
    """The part of torch.cuda that a meter uses.

    Attributes
    ----------
    resets : int
        How often anybody has reset the peak.
    """

    def __init__(self) -> None:
        self._meter = CpuMeter()
        self.resets = 0

    def reset(self, index: Any = None) -> None:
        """As torch.cuda.reset_peak_memory_stats."""
        self.resets += 1
        self._meter.reset_peak()

    def peak_bytes(self) -> int:
        """As torch.cuda.max_memory_allocated."""
        return self._meter.peak_bytes()

    def statistics(self, index: Any = None) -> dict[str, int]:
        """As torch.cuda.memory_stats."""
        name = "requested_bytes.all"
        live_bytes, peak_bytes = self._meter.live_bytes(), self._meter.peak_bytes()
        return {f"{name}.current": live_bytes, f"{name}.peak": peak_bytes}


def steps_metered_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> OnePeak:
    """Let steps on the CPU be measured by statistics such as a GPU has."""
    device = OnePeak()
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "memory_stats", device.statistics)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", device.reset)

    def meter_for(device: Any) -> Meter:
        return CudaMeter(torch.device("cuda:0"))

    monkeypatch.setattr(guarding, "meter_for", meter_for)
    return device
