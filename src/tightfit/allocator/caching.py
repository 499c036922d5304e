"""The caching allocator of a GPU: its allocated and reserved bytes, and giving cached bytes
back."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AllocatorState:
    """A caching allocator at one moment."""

    allocated_bytes: int
    reserved_bytes: int  # taken from the device: allocated, cached, or lost between blocks
    retries: int  # how often so far it has given all that was cached back to serve a request


class CudaCachingAllocator:
    page_bytes = 22 << 20
    """By which it takes memory from the device: about so much is reserved and not allocated, of
    segments that expand, for large requests and for small ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state(self) -> AllocatorState:
        found = torch.cuda.memory_stats(self._device)
        return AllocatorState(
            allocated_bytes=int(found.get("allocated_bytes.all.current", 0)),
            reserved_bytes=int(found.get("reserved_bytes.all.current", 0)),
            retries=int(found.get("num_alloc_retries", 0)),
        )

    def return_cached(self) -> None:
        """Give cached memory back to the device."""
        return_cached(self._device)


def return_cached(device: torch.device) -> None:
    """Give cached memory of a device's allocator back, if it is a GPU."""
    if device.type == "cuda" and torch.cuda.is_available():
        torch.cuda.empty_cache()
