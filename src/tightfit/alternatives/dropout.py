"""Dropout whose mask takes one bit for each element."""

from __future__ import annotations

import dataclasses

import torch

from tightfit.alternatives.base import Extension, Implementation, OpView
from tightfit.alternatives.bits import bits_of, by_stretches, flat, packed, stretches, unpack
from tightfit.alternatives.kernels import runs_on
from tightfit.capture.operators.dropout import scaled_dropout

aten = torch.ops.aten

# elements of a stretch, which a kernel turns into numbers at a time; how many stretches, at least
_LEAST, _MOST, _PARTS = 1 << 12, 1 << 16, 16


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
    made = gradient.new_empty_strided(gradient.shape, strides)
    given, written = flat(gradient, strides), flat(made, strides)
    if runs_on(gradient):
        from tightfit.alternatives.kernels.bits import keep_marked

        keep_marked(given, bits, written, scale)
        return made
    for part, its_bits in stretches(given):
        mask = unpack(bits[its_bits], part.stop - part.start).view(torch.bool)
        written[part].copy_(aten.native_dropout_backward.default(given[part], mask, scale))
    return made


def gradient_in_stretches(
    gradient: torch.Tensor, mask: torch.Tensor, scale: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the gradient of a dropout's input; of a CPU's kernel two further tensors are made.

    `gradient`, `mask`: dense, and laid out alike, or the gradient is an expanded number. `out`: is
    written over, and may be the gradient.
    """
    strides = mask.stride()
    made = gradient.new_empty_strided(gradient.shape, strides) if out is None else out
    given, marks, written = (flat(tensor, strides) for tensor in (gradient, mask, made))
    step = min(_MOST, max(_LEAST, given.numel() // _PARTS))
    for place, marked, result in zip(
        *(t.split(step) for t in (given, marks, written)), strict=True
    ):
        torch.mul(place, marked, out=result).mul_(scale)
    return made


def gradient_in_stretches_(
    gradient: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Write the gradient of a dropout's input over that of its output."""
    return gradient_in_stretches(gradient, mask, scale, out=gradient)


def dropout_gradient(view: OpView) -> Extension | None:
    """Offer the gradient of a dropout from bits, and in stretches."""
    gradient, mask, scale = view.call.args
    forward = view.maker_of(mask, (aten.native_dropout.default, scaled_dropout))
    if forward is None or mask.meta["val"].dtype != torch.bool:
        return None
    bits = bits_of(view, "dropout.bits", kept, mask, gradient)
    if bits is None:
        return None
    args = (gradient, bits.node, bits.args[1], scale)
    offers = [Implementation("dropout.from_bits", gradient_of_kept, args, rests_on=(forward,))]
    if view.runs_on_cpu:  # a GPU's kernel makes nothing else
        offer = Implementation("dropout.in_stretches", gradient_in_stretches, view.call.args)
        offers.append(offer)
        if view.fits_over(gradient, offer):
            over = dataclasses.replace(
                offer,
                name="dropout.in_stretches.over_argument_0",
                function=gradient_in_stretches_,
                overwrites=gradient,
            )
            offers.append(over)
    return Extension(tuple(offers), extras=(bits,))
