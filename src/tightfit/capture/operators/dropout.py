"""Dropout as plain PyTorch computes it on a CPU.

While tracing, torch turns dropout into `native_dropout`, which keeps a mask of one byte for each
element where plain PyTorch keeps the scaled noise; the draws are the same. But plain PyTorch
divides the noise by the probability to keep in the tensor's own precision, and `native_dropout`
multiplies by a quotient of Python floats. For some probabilities, and always in half precision, the
last bit differs: `normalise.dropout` corrects it. And where everything is dropped plain PyTorch
draws nothing.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten


def dropout(x: torch.Tensor, probability: float, training: bool) -> torch.Tensor:
    """Drop elements; nothing is drawn where all of them, or none, are dropped."""
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
