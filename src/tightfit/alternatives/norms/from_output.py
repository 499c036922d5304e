"""Gradients of norms from their output, which the next layer keeps anyway (MONeT, table 2).

The normalised input is the output less the bias, divided by the weight. The operators of the
backward give the same from it with a mean of zero and a deviation of one. Where a weight is near
zero compared with its bias nothing is left of it. Then these alternatives are not offered, and a
step that used such a weight is captured again (`FarFromZero`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tightfit.alternatives.base import Extension, Implementation, OpView, slices
from tightfit.alternatives.kernels import runs_on
from tightfit.capture.captured import FarFromZero

aten = torch.ops.aten

Gradients = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]

_AT_ONCE = 1 << 18  # elements of the normalised input at once
_PRECISE = (torch.float32, torch.float64)


def normalised(
    output: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the normalised input of a norm: ``(output - bias) / weight``."""
    if weight is None:
        return output
    return (output / weight) if bias is None else (output - bias).div_(weight)


def gradients_of_batch_norm(
    gradient: torch.Tensor,
    output: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    deviation: torch.Tensor,
    mask: list[bool],
) -> Gradients:
    """Return the gradients of a BatchNorm's input, weight and bias.

    The kernel is called as if the output was normalised, with the bias as its mean and the weight
    as its deviation. It gets the weight that makes the slope come out as it was.

    `gradient`, `output` [N, C, ...]: of the norm. `weight`, `bias` [C]: of the norm. `deviation`
    [C]: the inverse deviation of its first run. `mask`: which gradients are wanted.
    """
    if weight is None:
        mean, inverse, slope = torch.zeros_like(deviation), torch.ones_like(deviation), deviation
    else:
        mean = torch.zeros_like(weight) if bias is None else bias
        inverse, slope = weight.reciprocal(), weight.square().mul_(deviation)
    return aten.native_batch_norm_backward.default(
        gradient, output, slope, None, None, mean, inverse, True, 0.0, mask
    )


def gradients_of_layer_norm(
    gradient: torch.Tensor,
    output: torch.Tensor,
    shape: list[int],
    deviation: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: list[bool],
) -> Gradients:
    """Return the gradients of a LayerNorm's input, weight and bias, some rows at a time.

    `gradient`, `output` [..., *shape]: of the norm. `shape`: of the part that is normalised
    together. `deviation` [..., 1]: the inverse deviation of each row in its first run. `mask`:
    which gradients are wanted.
    """
    width = math.prod(shape)
    if weight is not None and runs_on(gradient) and gradient.dtype == weight.dtype:
        from tightfit.alternatives.kernels.layer_norm import LONGEST, gradients_of_rows

        if width <= LONGEST:
            rows = (gradient.reshape(-1, width), output.reshape(-1, width), deviation.flatten())
            flat = (t if t is None else t.flatten() for t in (weight, bias))
            made = gradients_of_rows(*rows, *flat)
            wanted = zip(made, (gradient, weight, weight), mask, strict=True)
            return tuple(t.view_as(like) if own else None for t, like, own in wanted)
    of_x = torch.empty_like(gradient)
    given, made, result = (t.view(-1, *shape) for t in (gradient, output, of_x))
    rows = deviation.view(-1, *[1] * len(shape))

    def run(part: slice) -> Gradients:
        x = normalised(made[part], weight, bias)
        ones = torch.ones_like(rows[part])
        zero = torch.zeros_like(ones)
        return aten.native_layer_norm_backward.default(
            given[part], x, shape, zero, ones, weight, bias, mask
        )

    return (of_x, *_summed(run, result, rows, width))


def gradients_of_group_norm(
    gradient: torch.Tensor,
    output: torch.Tensor,
    deviation: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    groups: int,
    mask: list[bool],
) -> Gradients:
    """Return the gradients of a GroupNorm's input, weight and bias, some images at a time.

    `gradient`, `output` [N, C, ...]: of the norm. `deviation` [N, groups]: the inverse deviation of
    each group in its first run. `weight`, `bias` [C]: of the norm. `mask`: which gradients are
    wanted.
    """
    images, channels, *places = output.shape
    wide = [channels, *[1] * len(places)]
    own = [None if t is None else t.view(wide) for t in (weight, bias)]
    of_x = torch.empty_like(gradient)
    slopes = deviation.repeat_interleave(channels // groups, 1).view(images, *wide)

    def run(part: slice) -> Gradients:
        x = normalised(output[part], *own)
        ones = torch.ones_like(deviation[part])
        count = (ones.shape[0], channels, math.prod(places), groups)
        return aten.native_group_norm_backward.default(
            gradient[part], x, torch.zeros_like(ones), ones, weight, *count, mask
        )

    return (of_x, *_summed(run, of_x, slopes, math.prod(output.shape[1:])))


def _summed(
    run: Callable[[slice], Gradients], of_x: torch.Tensor, slopes: torch.Tensor, width: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Run on some rows at a time: write the input's gradient, return those of the parameters."""
    of_weight: torch.Tensor | None = None
    of_bias: torch.Tensor | None = None
    for part in slices(of_x.shape[0], max(1, _AT_ONCE // max(1, width))):
        its_x, its_weight, its_bias = run(part)
        torch.mul(its_x, slopes[part], out=of_x[part])
        of_weight = its_weight if of_weight is None else of_weight.add_(its_weight)
        of_bias = its_bias if of_bias is None else of_bias.add_(its_bias)
    return of_weight, of_bias


def batch_norm_from_output(view: OpView) -> Extension | None:
    """Offer the gradients of a training BatchNorm from its output."""
    gradient, _, weight, _, _, mean, deviation, training, _, mask = view.call.args
    forward = view.maker_of(mean, (aten._native_batch_norm_legit_functional.default,))
    if not training or forward is None:
        return None
    bias = forward.args[2]
    return _from_output(
        view,
        "batch_norm",
        forward,
        (weight, bias),
        gradients_of_batch_norm,
        lambda output: (gradient, output, weight, bias, deviation, mask),
    )


def layer_norm_from_output(view: OpView) -> Extension | None:
    """Offer the gradients of a LayerNorm from its output."""
    gradient, _, shape, mean, deviation, weight, bias, mask = view.call.args
    forward = view.maker_of(mean, (aten.native_layer_norm.default,))
    if not mask[0] or not gradient.meta["val"].is_contiguous():
        return None
    return _from_output(
        view,
        "layer_norm",
        forward,
        (weight, bias),
        gradients_of_layer_norm,
        lambda output: (gradient, output, shape, deviation, weight, bias, mask),
    )


def group_norm_from_output(view: OpView) -> Extension | None:
    """Offer the gradients of a GroupNorm from its output."""
    gradient, _, mean, deviation, weight, _, _, _, groups, mask = view.call.args
    forward = view.maker_of(mean, (aten.native_group_norm.default,))
    if not mask[0] or forward is None:
        return None
    bias = forward.args[2]
    return _from_output(
        view,
        "group_norm",
        forward,
        (weight, bias),
        gradients_of_group_norm,
        lambda output: (gradient, output, deviation, weight, bias, groups, mask),
    )


def _from_output(
    view: OpView,
    family: str,
    forward: fx.Node | None,
    parameters: tuple[Any, Any],
    function: Callable[..., Any],
    arguments: Callable[[fx.Node], tuple[Any, ...]],
) -> Extension | None:
    """Offer an implementation with arguments from the output, if that is precise enough."""
    output = None if forward is None else view.output_of(forward, 0)
    if forward is None or output is None or not view.may_rest_on_weights(*parameters):
        return None
    value, like = output.meta["val"], view.node.meta["val"][0]
    alike = like is not None and value.dtype == like.dtype and value.stride() == like.stride()
    if value.dtype not in _PRECISE or not value.numel() or not alike:
        return None
    weight, bias = parameters
    offer = Implementation(
        f"{family}.from_output",
        function,
        arguments(output),
        exactness="rounding",
        rests_on=(forward,),
        compiles=False,
        condition=None if weight is None else FarFromZero(weight, bias),
    )
    return Extension((offer,))
