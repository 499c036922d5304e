"""Gradients of an RMSNorm from its output, which the next layer keeps anyway.

PyTorch takes an RMSNorm apart: its backward multiplies by its input, raises that to a power, and
multiplies by the normalised input. Input and normalised input are the output divided by the weight,
the former by the inverse deviation, too. So neither has to be kept, and of a residual stream
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tightfit.alternatives.base import Extension, Implementation, OpView, slices
from tightfit.capture.captured import FarFromZero

aten = torch.ops.aten

_PRODUCT = (aten.mul.Tensor,)
_SUMS = (aten.add.Scalar, aten.add.Tensor)
_AT_ONCE = 1 << 18  # elements that are there at once
_PRECISE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class _Normed:
    """The input of an RMSNorm, or the normalised input, as it follows from its output."""

    # output, weight: of the norm
    output: fx.Node
    weight: fx.Node
    deviation: fx.Node | None  # the inverse deviation, [..., 1], if the norm's input is meant
    forward: tuple[fx.Node, ...]  # ops that make the output of it, and the deviation


def product_with_normed(
    other: torch.Tensor, output: torch.Tensor, weight: torch.Tensor, deviation: torch.Tensor | None
) -> torch.Tensor:
    """Return another tensor times the (normalised) input of a norm, some rows at a time.

    `other`, `output` [..., D]: the output is that of the norm. `weight` [D]: of the norm.
    `deviation` [..., 1]: the inverse deviation, if the norm's input is meant.
    """
    result = torch.empty_like(output)
    given = other.view(-1, other.shape[-1])
    for part, made, normed in _stretches(result, output, weight, deviation):
        torch.mul(given[part], normed, out=made)
    return result


def power_of_normed(
    exponent: float, output: torch.Tensor, weight: torch.Tensor, deviation: torch.Tensor | None
) -> torch.Tensor:
    """Return a power of the (normalised) input of a norm; see `product_with_normed`."""
    result = torch.empty_like(output)
    for _, made, normed in _stretches(result, output, weight, deviation):
        torch.pow(normed, exponent, out=made)
    return result


def _stretches(
    result: torch.Tensor, output: torch.Tensor, weight: torch.Tensor, deviation: torch.Tensor | None
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield some rows, the place of their result, and the (normalised) input of the norm."""
    width = output.shape[-1]
    made, given = result.view(-1, width), output.view(-1, width)
    for part in slices(given.shape[0], max(1, _AT_ONCE // max(1, width))):
        normed = given[part] / weight
        if deviation is not None:
            normed.div_(deviation.view(-1, 1)[part])
        yield part, made[part], normed


def rms_norm_from_output(view: OpView) -> Extension | None:
    """Offer products and powers in the backward of an RMSNorm from its output."""
    value = view.node.meta["val"]
    if view.is_forward(view.node) or value.dtype not in _PRECISE or not value.numel():
        return None
    arguments = view.call.args[:2]
    for position, tensor in enumerate(arguments):
        normed = _normed(view, tensor)
        if normed is not None and _is_alike(normed.output, value):
            other = arguments[1 - position]
            is_power = view.node.target not in _PRODUCT
            if is_power or (isinstance(other, fx.Node) and _is_alike(other, value)):
                return Extension((_implementation(normed, other, is_power=is_power),))
    return None


def _implementation(normed: _Normed, other: Any, *, is_power: bool) -> Implementation:
    return Implementation(
        "rms_norm.from_output",
        power_of_normed if is_power else product_with_normed,
        (other, normed.output, normed.weight, normed.deviation),
        exactness="rounding",
        rests_on=normed.forward,
        compiles=False,
        condition=FarFromZero(normed.weight, None),
    )


def _is_alike(node: fx.Node, value: torch.Tensor) -> bool:
    other = node.meta["val"]
    alike = isinstance(other, torch.Tensor) and other.dtype == value.dtype
    return alike and other.shape == value.shape and other.is_contiguous() and value.is_contiguous()


def _normed(view: OpView, tensor: Any) -> _Normed | None:
    """Return a tensor as it follows from the output of the RMSNorm that read or made it."""
    if not isinstance(tensor, fx.Node) or not view.is_forward(tensor):
        return None
    for scaled in (tensor, *tensor.users):
        roots, weighted = _roots_of(view, scaled), _weighted(view, scaled)
        if not roots or weighted is None or tensor is roots[-1]:
            continue
        if tensor is scaled:
            return _Normed(*weighted, None, (weighted[0],))
        return _Normed(*weighted, roots[-1], (*roots, scaled, weighted[0]))
    return None


def _weighted(view: OpView, normalised: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the output of a norm's weight on the normalised input, and the weight."""
    for user in normalised.users:
        if user.target in _PRODUCT and view.is_forward(user):
            weight = next((a for a in user.args if a is not normalised), None)
            is_weight = isinstance(weight, fx.Node) and weight.op == "placeholder"
            width = normalised.meta["val"].shape[-1:]
            if is_weight and weight.meta["val"].shape == width:
                return (user, weight) if view.may_rest_on_weights(weight, None) else None
    return None


def _roots_of(view: OpView, scaled: fx.Node) -> tuple[fx.Node, ...]:
    """Return operators that end in the inverse deviation of the tensor a product scales by it."""
    if scaled.target not in _PRODUCT or not view.is_forward(scaled):
        return ()
    for x, deviation in (scaled.args[:2], scaled.args[1::-1]):
        found = [view.maker_of(deviation, (aten.rsqrt.default,))]
        for operators in (_SUMS, (aten.mean.dim,), (aten.pow.Tensor_Scalar,)):
            last = found[-1]
            found.append(None if last is None else view.maker_of(last.args[0], operators))
        makers = [maker for maker in reversed(found) if maker is not None]
        if len(makers) == len(found) and makers[0].args == (x, 2):
            return tuple(makers) if makers[-1].meta["val"].shape[-1] == 1 else ()
    return ()
