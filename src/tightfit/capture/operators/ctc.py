"""The CTC loss in a trace: its lengths are tensors to the user and numbers to the kernel.

They nearly always follow from the inputs; they are looked up, and later calls check them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tightfit.torch_private import core as private

__all__ = ["traced_ctc"]

aten = torch.ops.aten

_MEAN, _SUM = 1, 2


def traced_ctc(values_of: Callable[[torch.Tensor], list[int]]) -> Any:
    """Return a context in which CTC losses are traced with their lengths as numbers.

    `values_of`: returns the values of a traced tensor of integers.
    """

    def traced(operator: Any, numbers_of: Callable[[Any], list[int]]) -> Callable[..., Any]:
        def loss(scores: Any, targets: Any, lengths: Any, counts: Any, *rest: Any) -> Any:
            if scores.device.type != "cpu":
                return private.composite(operator, scores, targets, lengths, counts, *rest)
            return _ctc_loss(scores, targets, numbers_of(lengths), numbers_of(counts), *rest)

        return loss

    operators = {aten.ctc_loss.Tensor: values_of, aten.ctc_loss.IntList: list}
    return private.python_kernels({each: traced(each, of) for each, of in operators.items()})


def _ctc_loss(
    scores: torch.Tensor,
    targets: torch.Tensor,
    lengths: list[int],
    target_lengths: list[int],
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Return the result of torch's own composite of kernels, bit for bit."""
    batched = scores if scores.dim() == 3 else scores.unsqueeze(1)
    targets = targets.to(torch.long)
    losses = aten._ctc_loss.default(
        batched, targets, lengths, target_lengths, blank, zero_infinity
    )[0]
    if zero_infinity:
        losses = torch.where(losses == torch.inf, losses.new_zeros(()), losses)
    if reduction == _MEAN:
        counts = torch.tensor([max(1, n) for n in target_lengths], dtype=losses.dtype)
        return (losses / counts).mean()
    if reduction == _SUM:
        return losses.sum()
    return losses if scores.dim() == 3 else losses.squeeze(0)
