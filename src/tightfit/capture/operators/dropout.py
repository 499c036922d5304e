"""Dropout as plain PyTorch computes it on a CPU.

While tracing, torch turns dropout into `native_dropout`, which keeps a mask of one byte for each
element where plain PyTorch keeps the scaled noise; the draws are the same. But plain PyTorch
divides the noise by the probability to keep in the tensor's own precision, and `native_dropout`
multiplies by a quotient of Python floats: for some probabilities, and always in half precision,
the last bit differs. And where everything is dropped plain PyTorch draws nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tightfit.capture.nodes import note_random
from tightfit.torch_private import core as private

__all__ = ["correct_dropout", "scaled_dropout", "traced_dropout"]

aten = torch.ops.aten


def traced_dropout() -> Any:
    """Return a context in which dropout is traced without draws where everything is dropped."""
    return private.python_kernels({aten.dropout.default: _dropout})


def _dropout(x: torch.Tensor, probability: float, training: bool) -> torch.Tensor:
    if not training or probability == 0:
        return x.clone()
    if probability == 1:
        return x.mul(x.new_zeros(()))
    return aten.native_dropout.default(x, probability, training)[0]


def scaled_dropout(
    x: torch.Tensor, probability: float, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` with elements dropped and the others scaled, and the mask of those kept."""
    mask = aten.bernoulli_.float(torch.empty_like(x, dtype=torch.bool), 1 - probability)
    return x.mul(mask).mul_(scale), mask


def correct_dropout(graph: fx.Graph) -> None:
    """Let every dropout of a traced step, and its backward, scale as plain PyTorch does."""
    for node in graph.nodes:
        if node.target is not aten.native_dropout.default:
            continue
        x, probability, training = node.args
        value = x.meta["val"]
        if value.device.type != "cpu" or not training or not 0 < probability < 1:
            continue
        scale = torch.ones((), dtype=value.dtype).div_(1 - probability).item()
        wide = torch.float64 if value.dtype == torch.float64 else torch.float32
        if scale == torch.tensor(1 / (1 - probability), dtype=wide).item():
            continue
        node.target = scaled_dropout
        node.args = (x, probability, scale)
        note_random(node, True)
        for output in list(node.users):
            for user in list(output.users):
                if user.target is aten.native_dropout_backward.default:
                    user.update_arg(2, scale)
