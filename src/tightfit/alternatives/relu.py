"""The gradient of a ReLU from one bit for each element (Gist, section 4; MONeT, appendix C).

Eager keeps a ReLU's output for it. Where the backward of the next layer needs that too, nothing
is won; behind a pooling, a sum or a mean it is the only one.
"""

from __future__ import annotations

import dataclasses

import torch

from tightfit.alternatives.base import Extension, Implementation, OpView
from tightfit.alternatives.bits import bits_of, by_stretches, flat, packed, stretches, unpack
from tightfit.alternatives.kernels import runs_on

aten = torch.ops.aten

_NUMBERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # as wide as an element


def passed(output: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a bit for each element of a ReLU's output: does the gradient pass?

    It does where the output is positive, and as in PyTorch where it is not a number.
    """
    if runs_on(output):
        from tightfit.alternatives.kernels.bits import pack_passed

        return packed(output, strides, pack_passed)
    return packed(output, strides, by_stretches(lambda part: (part <= 0).logical_not_()))


def pass_marked(
    gradient: torch.Tensor,
    bits: torch.Tensor,
    strides: tuple[int, ...],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient where it passes and zero elsewhere, even where it is infinite.

    `gradient`: of the ReLU's output. `bits`: from `passed`. `strides`: of the ReLU's output. `out`:
    dense, of these strides: written over.
    """
    if out is None:
        out = gradient.new_empty_strided(gradient.shape, strides)
    if runs_on(gradient):
        from tightfit.alternatives.kernels.bits import keep_marked

        keep_marked(flat(gradient, strides), bits, flat(out, strides))
        return out
    kind = _NUMBERS[gradient.element_size()]
    given, made = flat(gradient, strides).view(kind), flat(out, strides).view(kind)
    for part, its_bits in stretches(given):
        keep = unpack(bits[its_bits], part.stop - part.start).to(kind).neg_()
        torch.bitwise_and(given[part], keep, out=made[part])
    return out


def pass_marked_(
    gradient: torch.Tensor, bits: torch.Tensor, strides: tuple[int, ...]
) -> torch.Tensor:
    """Set the gradient to zero where it does not pass, in place."""
    return pass_marked(gradient, bits, strides, out=gradient)


def relu_gradient(view: OpView) -> Extension | None:
    """Offer the gradient of a ReLU from bits, where only it reads the output in the backward."""
    gradient, output, threshold = view.call.args
    value = output.meta["val"]
    plain = threshold == 0 and value.element_size() in _NUMBERS and value.is_floating_point()
    forward = view.maker_of(output, (aten.relu.default,))
    if not plain or forward is None or view.is_kept_for_others(output):
        return None
    bits = bits_of(view, "relu.bits", passed, output, gradient)
    if bits is None:
        return None
    args = (gradient, bits.node, bits.args[1])
    offer = Implementation("relu.from_bits", pass_marked, args, rests_on=(forward,))
    offers = [offer]
    if view.fits_over(gradient, offer):
        name = "relu.from_bits.over_gradient"
        offers.append(
            dataclasses.replace(offer, name=name, function=pass_marked_, overwrites=gradient)
        )
    return Extension(tuple(offers), extras=(bits,))
