"""Gradients of activations from their output, which the next layer keeps anyway.

The sign of a leaky ReLU's output is that of its input. A hardtanh's output is at a limit exactly
where its input is not inside. Below zero an ELU's slope is its output plus alpha. So the operators
of the backward give the same from the output (MONeT, table 2). The slope of a softplus is ``1 -
exp(-beta * output)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tightfit.alternatives.base import Extension, Implementation, OpView, arguments_of
from tightfit.graph.ir import Exactness

aten = torch.ops.aten


def hardtanh_gradient(view: OpView) -> Extension | None:
    """Offer the gradient of a hardtanh or ReLU6 from its output."""
    gradient, x, low, high = arguments_of(view.node)
    forward = view.reader_of(x, (aten.hardtanh.default,), low, high)
    return _from_output(view, "hardtanh", forward, lambda y: (gradient, y, low, high))


def leaky_relu_gradient(view: OpView) -> Extension | None:
    """Offer the gradient of a leaky ReLU from its output, if that has the sign of the input."""
    gradient, x, slope, is_output = arguments_of(view.node)
    if is_output or slope <= 0:
        return None
    forward = view.reader_of(x, (aten.leaky_relu.default,), slope)
    return _from_output(view, "leaky_relu", forward, lambda y: (gradient, y, slope, True))


def elu_gradient(view: OpView) -> Extension | None:
    """Offer the gradient of an ELU, SELU or CELU from its output; it rounds differently."""
    gradient, *scales, is_output, x = arguments_of(view.node)
    if is_output or min(scales) <= 0:
        return None
    forward = view.reader_of(x, (aten.elu.default,), *scales)
    return _from_output(
        view, "elu", forward, lambda y: (gradient, *scales, True, y), exactness="rounding"
    )


def times_slope(gradient: torch.Tensor, output: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the gradient of the input of ``log(1 + exp(beta * x)) / beta``.

    `beta`: of the softplus. Above its threshold it gives its input, and the slope rounds to one.
    """
    return output.mul(-beta).expm1_().neg_().mul_(gradient)


def softplus_gradient(view: OpView) -> Extension | None:
    gradient, x, beta, threshold = arguments_of(view.node)
    forward = view.reader_of(x, (aten.softplus.default,), beta, threshold)
    if forward is None or beta <= 0:
        return None
    name, args = "softplus.from_output", (gradient, forward, beta)
    offer = Implementation(name, times_slope, args, exactness="rounding", rests_on=(forward,))
    return Extension((offer,))


def _from_output(
    view: OpView,
    family: str,
    forward: fx.Node | None,
    arguments: Callable[[fx.Node], tuple[Any, ...]],
    exactness: Exactness = "bitwise",
) -> Extension | None:
    if forward is None or forward.meta["val"].stride() != forward.args[0].meta["val"].stride():
        return None
    function, name = view.call.function, f"{family}.from_output"
    offer = Implementation(
        name, function, arguments(forward), exactness=exactness, rests_on=(forward,)
    )
    return Extension((offer,))
