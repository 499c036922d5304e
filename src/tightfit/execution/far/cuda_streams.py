"""The streams of a CUDA device that copies run in."""

from __future__ import annotations

import torch


class CudaStreams:
    """The current stream of a device, and two of its own: stores and loads.

    See `Streams` (`tightfit.execution.far.pinned`).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stores, self.loads = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def mark(self, stream: torch.cuda.Stream, *, is_timed: bool = False) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=is_timed)
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        return begin.elapsed_time(end) / 1e3 if end.query() else None
