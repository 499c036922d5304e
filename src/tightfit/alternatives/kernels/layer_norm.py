"""The gradients of a LayerNorm from its output, in one pass over both."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LONGEST = 8192
"""Numbers in a row: a program holds a whole row."""

_ROWS = 16  # per program, which adds up their gradients of weight and bias


@triton.jit
def _gradients(
    gradient, output, weight, bias, deviation, of_x, of_weight, of_bias, rows, width,
    has_bias: tl.constexpr, at_once: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, size)
    inside = column < width
    scale = tl.load(weight + column, mask=inside, other=1).to(tl.float32)
    shift = tl.zeros((size,), tl.float32)
    if has_bias:
        shift = tl.load(bias + column, mask=inside, other=0).to(tl.float32)
    its_weight = tl.zeros((size,), tl.float32)
    its_bias = tl.zeros((size,), tl.float32)
    for number in range(at_once):
        row = program * at_once + number
        there = inside & (row + 0 * column < rows)
        given = tl.load(gradient + row * width + column, mask=there, other=0).to(tl.float32)
        made = tl.load(output + row * width + column, mask=there, other=0).to(tl.float32)
        slope = tl.load(deviation + tl.minimum(row, rows - 1)).to(tl.float32)
        x = tl.where(there, (made - shift) / scale, 0.0)
        weighted = given * scale
        mean = tl.sum(weighted, 0) / width
        along = tl.sum(weighted * x, 0) / width
        own = slope * (weighted - mean - x * along)
        tl.store(of_x + row * width + column, own.to(of_x.dtype.element_ty), mask=there)
        its_weight += given * x
        its_bias += given
    tl.store(of_weight + program * width + column, its_weight, mask=inside)
    tl.store(of_bias + program * width + column, its_bias, mask=inside)


def gradients_of_rows(
    gradient: torch.Tensor,
    output: torch.Tensor,
    deviation: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of a LayerNorm's input, weight and bias.

    `gradient`, `output` [rows, width]: of the norm, contiguous. `deviation` [rows]: the inverse
    deviation of each row. `weight`, `bias` [width]: of the norm; there may be no bias, whose
    gradient is made all the same.
    """
    rows, width = gradient.shape
    programs = triton.cdiv(rows, _ROWS)
    of_x = torch.empty_like(gradient)
    sums = torch.empty(2, programs, width, dtype=torch.float32, device=gradient.device)
    _gradients[(programs,)](
        gradient, output, weight, weight if bias is None else bias, deviation, of_x, sums[0],
        sums[1], rows, width, bias is not None, _ROWS, triton.next_power_of_2(width),
    )  # fmt: skip
    of_weight, of_bias = sums.sum(1).to(weight.dtype)
    return of_x, of_weight, of_bias
