"""The gradient of a hardsigmoid from one bit for each element, instead of its input.

Its slope is a sixth where the input is between -3 and 3, and zero elsewhere.
"""

from __future__ import annotations

import torch

from tightfit.alternatives.base import Extension, OpView, Way, is_dense
from tightfit.alternatives.bits import bit_bytes, flat, pack, stretches, unpack

aten = torch.ops.aten


def sloped(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a bit for each element of a hardsigmoid's input: is it inside?"""
    elements = flat(x, strides)
    bits = torch.empty(bit_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    for part, its_bits in stretches(elements):
        inside = elements[part] > -3
        pack(inside.logical_and_(elements[part] < 3), bits[its_bits])
    return bits


def slope_marked(
    gradient: torch.Tensor, bits: torch.Tensor, strides: tuple[int, ...]
) -> torch.Tensor:
    """Return a sixth of the gradient where it is marked, and zero elsewhere.

    `bits`: from `sloped`. `strides`: of the hardsigmoid's input.
    """
    made = torch.empty_strided(
        gradient.shape, strides, dtype=gradient.dtype, device=gradient.device
    )
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
    value = x.meta["val"]
    strides = tuple(value.stride())
    if not is_dense(value) or tuple(gradient.meta["val"].stride()) != strides:
        return None
    forward = view.reader_of(x, (aten.hardsigmoid.default,))
    if forward is None or view.is_kept_for_others(x):
        return None
    made = value.new_empty(bit_bytes(value.numel()), dtype=torch.uint8)
    bits = view.extra("hardsigmoid.bits", sloped, x, strides, made=made)
    way = Way("hardsigmoid.from_bits", slope_marked, (gradient, bits.node, strides))
    return Extension((way,), extras=(bits,))
