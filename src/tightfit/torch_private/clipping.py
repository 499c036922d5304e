"""The computation of `clip_grad_norm_` on one gradient."""

from __future__ import annotations

import torch
from torch.utils._foreach_utils import _has_foreach_support


def norm_of_gradient(gradient: torch.Tensor) -> torch.Tensor:
    if _has_foreach_support([gradient], gradient.device):
        return torch._foreach_norm([gradient], 2.0)[0]
    return torch.linalg.vector_norm(gradient, 2.0)


def scale_gradient(gradient: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply a gradient with a number, in place."""
    if _has_foreach_support([gradient], gradient.device):
        torch._foreach_mul_([gradient], factor)
    else:
        gradient.mul_(factor)
