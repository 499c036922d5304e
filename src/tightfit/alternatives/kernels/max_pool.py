"""Positions of maxima in their windows, and the gradient from that, each place by itself.

Images are looked at as three-dimensional; a flat one has a depth of one. A place adds up the
gradients of the windows whose maximum it is, in the order of the windows: always the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PLACES = 256


@triton.jit
def _offsets(
    indices, out, count, windows_y, windows_x, windows_z, height, width,
    extent_y, extent_x, stride_z, stride_y, stride_x, pad_z, pad_y, pad_x,
    size: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    inside = at < count
    index = tl.load(indices + at, mask=inside, other=0)
    x = index % width - ((at % windows_x) * stride_x - pad_x)
    y = (index // width) % height - (((at // windows_x) % windows_y) * stride_y - pad_y)
    window_z = (at // (windows_x * windows_y)) % windows_z
    z = index // (width * height) - (window_z * stride_z - pad_z)
    offset = (z * extent_y + y) * extent_x + x
    tl.store(out + at, offset.to(tl.uint8), mask=inside)


@triton.jit
def _gradient(
    gradient, offsets, out, count, windows_z, windows_y, windows_x, depth, height, width,
    extent_z, extent_y, extent_x, stride_z, stride_y, stride_x, pad_z, pad_y, pad_x,
    most_z: tl.constexpr, most_y: tl.constexpr, most_x: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    inside = at < count
    x = at % width + pad_x
    y = (at // width) % height + pad_y
    z = (at // (width * height)) % depth + pad_z
    image = at // (width * height * depth)
    total = tl.zeros((size,), tl.float32)
    for back_z in tl.static_range(most_z):
        window_z = z // stride_z - (most_z - 1 - back_z)
        for back_y in tl.static_range(most_y):
            window_y = y // stride_y - (most_y - 1 - back_y)
            for back_x in tl.static_range(most_x):
                window_x = x // stride_x - (most_x - 1 - back_x)
                in_z, in_y = z - window_z * stride_z, y - window_y * stride_y
                in_x = x - window_x * stride_x
                real = inside & (window_z >= 0) & (window_y >= 0) & (window_x >= 0)
                real = real & (window_z < windows_z) & (window_y < windows_y)
                real = real & (window_x < windows_x) & (in_x < extent_x)
                real = real & (in_z < extent_z) & (in_y < extent_y)
                window = ((image * windows_z + window_z) * windows_y + window_y) * windows_x
                window += window_x
                place = tl.load(offsets + window, mask=real, other=0).to(tl.int64)
                mine = real & (place == (in_z * extent_y + in_y) * extent_x + in_x)
                total += tl.load(gradient + window, mask=mine, other=0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def _three(numbers: tuple[int, ...], first: int) -> tuple[int, ...]:
    return (first,) * (3 - len(numbers)) + tuple(numbers)


def offsets_of(
    indices: torch.Tensor,
    sizes: tuple[int, ...],
    extents: tuple[int, ...],
    strides: tuple[int, ...],
    padding: tuple[int, ...],
) -> torch.Tensor:
    """Return for each maximum its offset inside its window, as uint8.

    `indices` [..., windows]: contiguous: places in the image, as pooling returns them. `sizes`,
    `extents`, `strides`, `padding`: of the image and of the windows, two or three of each.
    """
    made = torch.empty_like(indices, dtype=torch.uint8)
    counts = _three(tuple(indices.shape[-len(sizes) :]), 1)
    _, height, width = _three(sizes, 1)
    _, extent_y, extent_x = _three(extents, 1)
    _offsets[(triton.cdiv(indices.numel(), _PLACES),)](
        indices, made, indices.numel(), counts[1], counts[2], counts[0], height, width,
        extent_y, extent_x, *_three(strides, 1), *_three(padding, 0), _PLACES,
    )  # fmt: skip
    return made


def gradient_of_image(
    gradient: torch.Tensor,
    offsets: torch.Tensor,
    sizes: tuple[int, ...],
    extents: tuple[int, ...],
    strides: tuple[int, ...],
    padding: tuple[int, ...],
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the gradient of the image, [..., image], contiguous, and return it.

    `gradient`, `offsets` [..., windows]: contiguous. `sizes`, `extents`, `strides`, `padding`: of
    the image and of the windows, two or three of each.
    """
    steps, spans = _three(strides, 1), _three(extents, 1)
    most = tuple(-(-span // step) for span, step in zip(spans, steps, strict=True))
    counts = _three(tuple(gradient.shape[-len(sizes) :]), 1)
    _gradient[(triton.cdiv(out.numel(), _PLACES),)](
        gradient, offsets, out, out.numel(), *counts, *_three(sizes, 1), *spans, *steps,
        *_three(padding, 0), *most, _PLACES,
    )  # fmt: skip
    return out
