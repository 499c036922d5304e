"""One bit for each element in one pass, and gradients where the bit is set."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BYTES = 256  # of bits, written by each program
_NUMBERS = {  # as wide an integer, that of all bits but the sign, and that of infinity
    torch.float32: (torch.int32, 0x7FFFFFFF, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80),
    torch.float16: (torch.int16, 0x7FFF, 0x7C00),
}


@triton.jit
def _pack(given, bits, elements, largest, infinity, size: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    packed = tl.zeros((size,), tl.int32)
    for bit in tl.static_range(8):
        element = places * 8 + bit
        number = tl.load(given + element, mask=element < elements, other=0)
        flag = (number > 0) | ((number & largest) > infinity)
        packed += ((flag & (element < elements)).to(tl.int32)) << bit
    tl.store(bits + places, packed.to(tl.uint8), mask=places * 8 < elements)


@triton.jit
def _keep(given, bits, out, elements, scale, scaled: tl.constexpr, size: tl.constexpr):
    element = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    inside = element < elements
    number = tl.load(given + element, mask=inside, other=0)
    packed = tl.load(bits + element // 8, mask=inside, other=0).to(tl.int32)
    flag = (packed >> (element % 8).to(tl.int32)) & 1
    if scaled:
        made = number.to(tl.float32) * flag.to(tl.float32) * scale
    else:
        made = tl.where(flag == 1, number, 0.0)
    tl.store(out + element, made.to(number.dtype), mask=inside)


def pack_passed(elements: torch.Tensor, bits: torch.Tensor) -> None:
    """Write a bit for each element of a ReLU's output: is it positive, or no number?

    `elements` [n]: in the order of memory. `bits` [ceil(n / 8)]: written.
    """
    kind, largest, infinity = _NUMBERS[elements.dtype]
    _pack[_programs(bits.numel())](
        elements.view(kind), bits, elements.numel(), largest, infinity, _BYTES
    )


def pack_kept(flags: torch.Tensor, bits: torch.Tensor) -> None:
    """Write the bits of flags, [n] bool."""
    _pack[_programs(bits.numel())](flags.view(torch.uint8), bits, flags.numel(), 1, 1, _BYTES)


def keep_marked(
    gradient: torch.Tensor, bits: torch.Tensor, out: torch.Tensor, scale: float | None = None
) -> None:
    """Write the gradient where its bit is set, and zero elsewhere.

    `gradient`, `out` [n]: in the order of memory; may be the same. `bits` [ceil(n / 8)]: as packed.
    `scale`: multiplied by the flag and by this, as the gradient of a dropout; None: selected.
    """
    count = gradient.numel()
    factor = 1.0 if scale is None else scale
    _keep[_programs(count, 8)](gradient, bits, out, count, factor, scale is not None, 8 * _BYTES)


def _programs(count: int, times: int = 1) -> tuple[int]:
    return (triton.cdiv(count, times * _BYTES),)
