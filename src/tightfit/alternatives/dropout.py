"""Dropout whose mask takes one bit for each element."""

from __future__ import annotations

import torch

from tightfit.alternatives.base import Extension, OpView, Way
from tightfit.alternatives.bits import (
    bits_of,
    by_stretches,
    flat,
    packed,
    stretches,
    unpack,
)
from tightfit.alternatives.kernels import runs_on
from tightfit.capture.operators.dropout import scaled_dropout

aten = torch.ops.aten


def kept(mask: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a mask as bits, in the order of its elements in memory."""
    if runs_on(mask):
        from tightfit.alternatives.kernels.bits import pack_kept

        return packed(mask, strides, pack_kept)
    return packed(mask, strides, by_stretches(torch.clone))


def gradient_of_kept(
    gradient: torch.Tensor, bits: torch.Tensor, strides: tuple[int, ...], scale: float
) -> torch.Tensor:
    """Return the gradient where it was kept, scaled, and zero elsewhere.

    `bits`: from `kept`. `scale`: one over the probability to be kept, as the forward multiplied.
    """
    made = torch.empty_strided(
        gradient.shape, strides, dtype=gradient.dtype, device=gradient.device
    )
    given, written = flat(gradient, strides), flat(made, strides)
    if runs_on(gradient):
        from tightfit.alternatives.kernels.bits import keep_marked

        keep_marked(given, bits, written, scale)
        return made
    for part, its_bits in stretches(given):
        mask = unpack(bits[its_bits], part.stop - part.start).view(torch.bool)
        written[part].copy_(aten.native_dropout_backward.default(given[part], mask, scale))
    return made


def dropout_gradient(view: OpView) -> Extension | None:
    """Offer the gradient of a dropout from bits."""
    gradient, mask, scale = view.call.args
    forward = view.maker_of(mask, (aten.native_dropout.default, scaled_dropout))
    bits = bits_of(view, "dropout.bits", kept, mask, gradient)
    if forward is None or bits is None or mask.meta["val"].dtype != torch.bool:
        return None
    args = (gradient, bits.node, bits.args[1], scale)
    way = Way("dropout.from_bits", gradient_of_kept, args, rests_on=(forward,))
    return Extension((way,), extras=(bits,))
