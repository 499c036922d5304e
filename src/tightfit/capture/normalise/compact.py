"""Results that own only their elements, not the larger storage they were made in.

Some kernels of PyTorch allocate more than they return and shrink it. A reduced loss is one number
in room for every element; an embedding bag's offsets have room for one more. Nothing in their
geometry tells. Here such a result is copied out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tightfit.capture.normalise.rewriting import Rewriting

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


def compact_embedding_bag(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Return the bags, to which bag each index belongs, their sizes and, of maxima, the places."""
    output, bag_of_index, sizes, places = aten._embedding_bag.default(*args, **kwargs)
    return output, bag_of_index.clone(), sizes, places


def compact_results(work: Rewriting) -> None:
    """Let every reduced loss of a traced step own only its number, and bags only their places."""
    for node in work.graph.nodes:
        if node.target is aten._embedding_bag.default:
            if node.meta["val"][1].device.type == "cpu":
                node.target = compact_embedding_bag
            continue
        position = _REDUCTION.get(node.target)
        if position is None:
            continue
        reduction = node.args[position] if position < len(node.args) else _MEAN
        if reduction != 0 and not node.kwargs:
            node.target = _COMPACT[node.target]
