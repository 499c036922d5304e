"""The gradient of a hardsigmoid from one bit for each element, instead of its input.

Its slope is a sixth where the input is between -3 and 3, and zero elsewhere.
"""

from __future__ import annotations

import torch

from tightfit.alternatives.base import Extension, Implementation, OpView
from tightfit.alternatives.bits import bits_of, by_stretches, flat, packed, stretches, unpack

aten = torch.ops.aten


def sloped(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a bit for each element of a hardsigmoid's input: is it inside?"""
    inside = by_stretches(lambda part: (part > -3).logical_and_(part < 3))
    return packed(x, strides, inside)


def slope_marked(
    gradient: torch.Tensor, bits: torch.Tensor, strides: tuple[int, ...]
) -> torch.Tensor:
    """Return a sixth of the gradient where it is marked, and zero elsewhere.

    `bits`: from `sloped`. `strides`: of the hardsigmoid's input.
    """
    made = gradient.new_empty_strided(gradient.shape, strides)
    given, written = flat(gradient, strides), flat(made, strides)
    for part, its_bits in stretches(given):
        # the operator itself, of an input that is inside (0) or outside (3)
        outside = unpack(bits[its_bits], part.stop - part.start).bitwise_xor_(1)
        stand_in = outside.to(given.dtype).mul_(3)
        written[part].copy_(aten.hardsigmoid_backward.default(given[part], stand_in))
    return made


def hardsigmoid_gradient(view: OpView) -> Extension | None:
    """Offer the gradient of a hardsigmoid from bits, where only it reads the input then."""
    gradient, x = view.call.args
    forward = view.reader_of(x, (aten.hardsigmoid.default,))
    if forward is None or view.is_kept_for_others(x):
        return None
    bits = bits_of(view, "hardsigmoid.bits", sloped, x, gradient)
    if bits is None:
        return None
    offer = Implementation(
        "hardsigmoid.from_bits", slope_marked, (gradient, bits.node, bits.args[1])
    )
    return Extension((offer,), extras=(bits,))
