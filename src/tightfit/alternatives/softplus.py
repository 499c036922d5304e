"""The gradient of a softplus from its output: its slope is ``1 - exp(-beta * output)``."""

from __future__ import annotations

import torch

from tightfit.alternatives.base import Extension, OpView, Way, arguments_of

__all__ = ["softplus_gradient", "times_slope"]

aten = torch.ops.aten


def times_slope(gradient: torch.Tensor, output: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the gradient of the input of ``log(1 + exp(beta * x)) / beta``.

    Parameters
    ----------
    gradient, output : Tensor
        Of the softplus.
    beta : float
        Of the softplus. Above its threshold it gives its input, and the slope rounds to one.
    """
    return output.mul(-beta).expm1_().neg_().mul_(gradient)


def softplus_gradient(view: OpView) -> Extension | None:
    """Offer the gradient of a softplus from its output."""
    gradient, x, beta, threshold = arguments_of(view.node)
    forward = view.reader_of(x, (aten.softplus.default,), beta, threshold)
    if forward is None or beta <= 0:
        return None
    name, args = "softplus.from_output", (gradient, forward, beta)
    way = Way(name, times_slope, args, exactness="rounding", rests_on=(forward,))
    return Extension((way,))
