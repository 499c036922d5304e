"""One stretch of a CUDA device's memory, in a pool of its own, that requests can be led in."""

from __future__ import annotations

import contextlib
from typing import Any, Literal, TypeAlias

import torch

ArenaMemoryState: TypeAlias = Literal["free", "held", "grown"]
"""Nothing is there; something is; more was taken from the device, as something had no room."""


class CudaArenaMemory:
    """A block of PyTorch's CUDA allocator, free, in a pool of which no other code requests memory.

    The allocator takes the smallest free stretch that is large enough. It keeps account itself of
    every byte: live bytes there are counted in its statistics, and nothing is allocated twice. The
    memory goes back when the object is gone and nothing in it is alive.

    Raises `torch.OutOfMemoryError` if the device has no such stretch. `address`: of its first byte.
    """

    def __init__(self, height_bytes: int, device: torch.device) -> None:
        self.height_bytes = height_bytes
        self._device = device
        self._pool = torch.cuda.MemPool()
        self._inside = contextlib.ExitStack()
        self._is_inside = False
        with torch.cuda.use_mem_pool(self._pool, device):
            block = torch.empty(height_bytes, dtype=torch.uint8, device=device)
            self.address = block.data_ptr()
            del block
        self._begin_bytes = self.reserved_bytes

    def state(self) -> ArenaMemoryState:
        """Return its state between two steps."""
        segments = self._segments()
        if sum(segment["total_size"] for segment in segments) > self._begin_bytes:
            return "grown"
        return "held" if any(segment["allocated_size"] for segment in segments) else "free"

    def take(self, size_bytes: int) -> tuple[int, torch.Tensor] | None:
        """Request a stretch; return its address, and its holder. None: there was no room."""
        with contextlib.ExitStack() as inside:
            if not self._is_inside:
                inside.enter_context(torch.cuda.use_mem_pool(self._pool, self._device))
            try:
                held = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError:
                return None
            return held.data_ptr() - self.address, held

    def enter(self) -> None:
        """Place requests of the calling thread here, from now on."""
        if not self._is_inside:
            self._inside.enter_context(torch.cuda.use_mem_pool(self._pool, self._device))
            self._is_inside = True

    def leave(self) -> None:
        """Place it elsewhere again; nothing happens outside."""
        self._is_inside = False
        self._inside.close()

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the pool took from the device: its height, and large requests without room."""
        return sum(segment["total_size"] for segment in self._segments())

    def _segments(self) -> list[dict[str, Any]]:
        """Return the segments of large requests; small ones have segments of their own."""
        segments = torch.cuda.memory_snapshot(self._pool.id)
        return [segment for segment in segments if segment["segment_type"] == "large"]
