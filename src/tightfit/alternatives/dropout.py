"""Dropout whose mask takes one bit for each element."""

from __future__ import annotations

import torch

from tightfit.alternatives.base import Extension, OpView, Way, is_dense
from tightfit.alternatives.bits import bit_bytes, flat, pack, stretches, unpack
from tightfit.alternatives.kernels import runs_on
from tightfit.capture.operators.dropout import scaled_dropout

aten = torch.ops.aten


def kept(mask: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a mask as bits, in the order of its elements in memory."""
    elements = flat(mask, strides)
    bits = torch.empty(bit_bytes(mask.numel()), dtype=torch.uint8, device=mask.device)
    if runs_on(mask):
        from tightfit.alternatives.kernels.bits import pack_kept

        pack_kept(elements, bits)
        return bits
    for part, its_bits in stretches(elements):
        pack(elements[part].clone(), bits[its_bits])
    return bits


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
    value = mask.meta["val"]
    strides = tuple(value.stride())
    if forward is None or not is_dense(value) or value.dtype != torch.bool:
        return None
    if tuple(gradient.meta["val"].stride()) != strides:
        return None
    made = value.new_empty(bit_bytes(value.numel()), dtype=torch.uint8)
    bits = view.extra("dropout.bits", kept, mask, strides, made=made)
    args = (gradient, bits.node, strides, scale)
    way = Way("dropout.from_bits", gradient_of_kept, args, rests_on=(forward,))
    return Extension((way,), extras=(bits,))
