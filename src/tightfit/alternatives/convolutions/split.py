"""The backward of a convolution in two parts: the gradient of the weight, then that of the input.

MONeT (section 5.2) splits it for the same reason: the gradient of the input does not read the
input, which can be freed before that gradient is made. The one operator runs the same
kernels one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tightfit.alternatives.base import Extension, Implementation, OpView
from tightfit.capture.nodes import base_of, storage_bytes

aten = torch.ops.aten

_LARGE_SHARE = 0.5  # of the largest inputs of a convolution's gradients


def gradients_of_weight(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of the weight, and of the bias if there is any.

    `gradient`, `x`, `weight`: of the output, the input, the kernel. `rest`: as in
    ``convolution_backward``.
    """
    *geometry, mask = rest
    made = aten.convolution_backward.default(gradient, x, weight, *geometry, [False, True, mask[2]])
    return (made[1], made[2]) if mask[2] else made[1]


def gradient_of_input(
    of_weight: torch.Tensor,
    of_bias: torch.Tensor | None,
    gradient: torch.Tensor,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    weight: torch.Tensor,
    *geometry: Any,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the weight, of the input and, if there is one, of the bias.

    The operator wants some tensor of the input's shape even where it does not look at it: the
    gradient of the output is given that shape. Where that is smaller than the input (a decoder's
    convolution of concatenated tensors), the transposed convolution runs, by the same kernel.

    `of_weight`, `of_bias`: from `gradients_of_weight`. `gradient`, `weight`: of the output, and the
    kernel. `geometry`: as in ``convolution_backward``, without the mask.
    """
    if gradient.numel() < math.prod(shape):
        of_x = _transposed(gradient, shape, weight, *geometry)
    else:
        stand_in = gradient.as_strided(shape, strides)
        of_x = aten.convolution_backward.default(
            gradient, stand_in, weight, *geometry, [True, False, False]
        )[0]
    return (of_weight, of_x) if of_bias is None else (of_weight, of_x, of_bias.clone())


def _transposed(
    gradient: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor,
    _bias_sizes: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    _transposed: bool,
    _output_padding: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """Return the gradient of a convolution's input as the transposed convolution."""
    sides = shape[2:], gradient.shape[2:], weight.shape[2:]
    settings = (_of_each_side(s, len(shape) - 2) for s in (stride, padding, dilation))
    rest = [
        x - ((y - 1) * s - 2 * p + d * (k - 1) + 1)
        for x, y, k, s, p, d in zip(*sides, *settings, strict=True)
    ]
    return aten.convolution.default(
        gradient, weight, None, stride, padding, dilation, True, rest, groups
    )


def _of_each_side(setting: Sequence[int], sides: int) -> Sequence[int]:
    """Return a setting for each side; one number holds for all of them."""
    return setting if len(setting) == sides else [setting[0]] * sides


def split_gradient(view: OpView) -> Extension | None:
    """Offer the two parts where they matter: to a value's last reader, or where it is large.

    Where another op reads the value later (the backward of the ReLU that made it), only the
    workspace shrinks, which matters for the largest.
    """
    if not _is_splittable(view.node):
        return None
    gradient, x, weight, *geometry, mask = view.call.args
    others = (n for n in view.captured.nodes if n.target is view.node.target)
    largest = max(_read_bytes(node) for node in others if _is_splittable(node))
    is_large = _read_bytes(view.node) >= _LARGE_SHARE * largest
    if not is_large and view.is_read_behind(x):
        return None
    flops = view.op.flops // 2
    extra = view.extra(
        "split.convolution_weight", gradients_of_weight, *view.call.args, flops=flops
    )
    of_weight, of_bias = extra.results if mask[2] else (extra.node, None)
    value = x.meta["val"]
    args = (of_weight, of_bias, gradient, tuple(value.shape), tuple(value.stride()), weight)
    outputs = (1, 0, 2) if mask[2] else (1, 0)
    offer = Implementation(
        "convolution.split",
        gradient_of_input,
        (*args, *geometry),
        outputs=outputs,
        overwrites=of_weight,
        flops=flops,
    )
    return Extension((offer,), extras=(extra,))


def _read_bytes(node: fx.Node) -> int:
    """The larger of two inputs: the gradient of the output, and the convolution's input."""
    return max(storage_bytes(given.meta["val"]) for given in node.args[:2])  # type: ignore


def _is_splittable(node: fx.Node) -> bool:
    gradient, source, mask = node.args[0], node.args[1], node.args[-1]
    if not isinstance(gradient, fx.Node) or not isinstance(source, fx.Node):
        return False
    if "placeholder" in (base_of(gradient).op, base_of(source).op):
        return False
    if not (mask[0] and mask[1]):  # type: ignore[index]
        return False
    given, wanted = gradient.meta["val"], source.meta["val"]
    dense = given.is_contiguous() or given.is_contiguous(memory_format=torch.channels_last)
    plain = wanted.is_contiguous() or wanted.is_contiguous(memory_format=torch.channels_last)
    fits = given.numel() >= wanted.numel() or not node.args[7]  # or not transposed itself
    return dense and plain and given.dtype == wanted.dtype and fits and wanted.numel() > 0
