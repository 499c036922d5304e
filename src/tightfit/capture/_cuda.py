"""What CUDA's libraries take of PyTorch's allocator and keep. Private names of torch."""

from __future__ import annotations

import torch

from tightfit.torch_private import core as private

__all__ = ["cublas_workspace_bytes"]

_CUBLAS_BYTES: dict[tuple[torch.device, int], int] = {}


def cublas_workspace_bytes(device: torch.device) -> int:
    """Return what cuBLAS keeps for the streams planned on, after letting it take that now.

    A workspace for each stream and thread: this one, and the one that runs backward.
    """
    stream = torch.cuda.current_stream(device).cuda_stream
    if (device, stream) not in _CUBLAS_BYTES:
        with private.without_modes(), torch.enable_grad():
            if not _CUBLAS_BYTES:
                torch._C._cuda_clearCublasWorkspaces()
            before = torch.cuda.memory_allocated(device)
            matrix = torch.ones(8, 8, device=device, requires_grad=True)
            (matrix @ matrix).sum().backward()
            del matrix
            taken = torch.cuda.memory_allocated(device) - before
        _CUBLAS_BYTES[device, stream] = max(taken, *_CUBLAS_BYTES.values(), 0)
    return sum(size for (d, _), size in _CUBLAS_BYTES.items() if d == device)
