"""A place for a storage in a pool of CUDA's caching allocator (PyTorch 2.13 and later)."""

from __future__ import annotations

import torch

__all__ = ["can_place", "placed"]


def can_place() -> bool:
    """Whether this release can be asked for a place."""
    return hasattr(torch.UntypedStorage, "_resize_with_addr_")


def placed(address: int, size_bytes: int, device: torch.device) -> torch.UntypedStorage | None:
    """Return a storage at an address of the calling thread's pool; None if that is not free.

    The allocator takes the bytes out of a free block, in the middle of it if need be, so that
    nobody else gets them while the storage lives.
    """
    storage = torch.UntypedStorage(0, device=device)
    try:
        storage._resize_with_addr_(size_bytes, address)  # type: ignore[attr-defined]
    except RuntimeError:  # what is not free, also out of memory
        return None
    return storage if storage.data_ptr() == address else None
