"""Gradients that are zero everywhere: tensors without memory for autograd, full ones in a plan."""

from __future__ import annotations

from typing import Any

import torch

from tightfit.torch_private import core as private

aten = torch.ops.aten


def traced_zeros() -> Any:
    """Return a context in which tensors of nothing but zeros are traced with memory of their own.

    Autograd has a kind of its own for them (of `sgn`, say), which must not be written into.
    """
    return private.python_kernels({aten._efficientzerotensor.default: _zeros})


def _zeros(size: Any, **options: Any) -> torch.Tensor:
    return aten.zeros.default(size, **options)
