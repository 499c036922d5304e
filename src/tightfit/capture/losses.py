"""Losses that own one number, not room for one number per element.

Some kernels of PyTorch allocate their result for every element and shrink it to the mean or sum:
the number stays in a storage of the full size, which nothing in its geometry tells. Here it is
copied out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

__all__ = ["compact_losses"]

aten = torch.ops.aten

_REDUCTION = {  # where each operator takes how it reduces; 0: not at all
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
}
_MEAN = 1  # the default


def _compact(operator: Any) -> Callable[..., torch.Tensor]:
    def loss(*args: Any) -> torch.Tensor:
        return operator(*args).clone()

    loss.__name__ = loss.__qualname__ = f"compact_{operator.overloadpacket.__name__}"
    return loss


_COMPACT = {operator: _compact(operator) for operator in _REDUCTION}


def compact_losses(graph: fx.Graph) -> None:
    """Let every reduced loss of a traced step own only its number."""
    for node in graph.nodes:
        position = _REDUCTION.get(node.target)
        if position is None:
            continue
        reduction = node.args[position] if position < len(node.args) else _MEAN
        if reduction != 0 and not node.kwargs:
            node.target = _COMPACT[node.target]
