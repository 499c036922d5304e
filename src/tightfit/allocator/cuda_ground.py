"""One stretch of a CUDA device's memory, in a pool of its own, where fillers can be placed.

Never run on a GPU: written from the sources and the description of PyTorch's change 178215.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from tightfit.torch_private.gpu import cuda_pool

__all__ = ["CudaGround", "why_not_placed"]

_MIB = 1 << 20


class CudaGround:
    """A block of PyTorch's CUDA allocator, free, in a pool that nobody else requests from.

    The allocator itself keeps account of every byte of it: what lives there is counted in its
    statistics, and nothing is given out twice. The memory goes back when the object is gone and
    nothing in it is alive.

    Parameters
    ----------
    height_bytes : int
        Its size.
    device : torch.device
        Where.

    Raises
    ------
    torch.OutOfMemoryError
        If the device has no such stretch.

    Attributes
    ----------
    address : int
        Of its first byte.
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

    def place(self, offset: int, size_bytes: int) -> torch.UntypedStorage | None:
        """Hold a stretch as long as what is returned lives; None if some of it is held."""
        with contextlib.ExitStack() as inside:
            if not self._is_inside:
                inside.enter_context(torch.cuda.use_mem_pool(self._pool, self._device))
            return cuda_pool.placed(self.address + offset, size_bytes, self._device)

    def enter(self) -> None:
        """Let what the calling thread requests lie here, from now on."""
        if not self._is_inside:
            self._inside.enter_context(torch.cuda.use_mem_pool(self._pool, self._device))
            self._is_inside = True

    def leave(self) -> None:
        """Let it lie elsewhere again; nothing happens outside."""
        self._is_inside = False
        self._inside.close()

    @property
    def held_bytes(self) -> int:
        """Bytes that the pool took from the device: its height, and what did not fit its plan."""
        segments: list[dict[str, Any]] = self._pool.snapshot(include_traces=False)
        return sum(segment["total_size"] for segment in segments)


@functools.cache
def why_not_placed(device: torch.device) -> str | None:
    """Return why requests cannot be led to places on a device; None if they can.

    Tries it: a request between two fillers, a filler where somebody lies, and all of it again.
    """
    if not cuda_pool.can_place():
        return f"PyTorch {torch.__version__} cannot be asked for an address (2.13 and later can)"
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        return f"the allocator in use is {backend}, which cannot be asked for an address"
    ground = CudaGround(32 * _MIB, device)
    fillers = [ground.place(0, 8 * _MIB), ground.place(14 * _MIB, 18 * _MIB)]
    ground.enter()
    tensor = torch.empty(6 * _MIB - 512, dtype=torch.uint8, device=device)
    ground.leave()
    goes = [
        (None not in fillers, "a stretch beside a free one cannot be held"),
        (tensor.data_ptr() - ground.address == 8 * _MIB, "a request does not take what is free"),
        (ground.place(8 * _MIB, 2 * _MIB) is None, "what is held can be held again"),
    ]
    del tensor
    fillers.clear()
    goes.append((ground.place(0, 32 * _MIB) is not None, "what was freed is not free as a whole"))
    return next((reason for works, reason in goes if not works), None)
