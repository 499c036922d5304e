"""Kernels for GPUs in Triton, each the twin of a function of tensors that runs everywhere.

In: arguments of the twin, dense and on a GPU. Out: the same bits, or for sums the same up to
rounding. Triton comes with PyTorch for CUDA; where it is missing the twin runs. Only `runs_on` may
be asked without it.

Written without a GPU: compared with the twins under Triton's interpreter (`TRITON_INTERPRET=1
pytest tests/contract/test_kernels.py`), and in `make gpu-proof`.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def runs_on(tensor: torch.Tensor) -> bool:
    """Whether kernels may run on a tensor: on a GPU, with Triton, not in double precision."""
    return tensor.device.type == "cuda" and tensor.dtype in _TYPES and _has_triton()
