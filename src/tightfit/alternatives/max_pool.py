"""The gradient of a max-pooling from each maximum's position in its window: one byte, not eight.

The place in the whole image follows from the place of the window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tightfit.alternatives.base import Extension, Implementation, OpView, arguments_of, slices
from tightfit.alternatives.kernels import runs_on

aten = torch.ops.aten

_FORWARD = {
    aten.max_pool2d_with_indices_backward.default: aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices_backward.default: aten.max_pool3d_with_indices.default,
}
MAX_POOL_GRADIENTS = tuple(_FORWARD)

_WRITING = {
    2: aten.max_pool2d_with_indices_backward.grad_input,
    3: aten.max_pool3d_with_indices_backward.grad_input,
}
_ON_CPU = 1 << 18  # places at once
_ON_GPU = 1 << 25
_BYTE = 256


@dataclass(frozen=True)
class Windows:
    """The positions of a pooling's windows."""

    sizes: tuple[int, ...]  # of the image: (height, width) or (depth, height, width)
    extents: tuple[int, ...]  # sizes of a window, dilation included
    # strides, padding: from window to window, and how far the first is outside
    strides: tuple[int, ...]
    padding: tuple[int, ...]

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """Sizes, extents, strides and padding."""
        return self.sizes, self.extents, self.strides, self.padding

    def starts(self, counts: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return where each of so many windows begins, as an index into the image."""
        total = torch.zeros((), dtype=torch.int64, device=device)
        for dimension, count in enumerate(counts):
            places = torch.arange(count, device=device)
            places = places * self.strides[dimension] - self.padding[dimension]
            shape = [-1 if d == dimension else 1 for d in range(len(counts))]
            step = math.prod(self.sizes[dimension + 1 :])
            total = total + (places * step).view(shape)
        return total

    def within(self, indices: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return indices into the image as offsets inside their windows."""
        distance = indices - starts
        offset = distance.clone()
        for d in range(1, len(self.sizes)):
            row = distance.div(math.prod(self.sizes[d:]), rounding_mode="floor")
            shorter = self.sizes[d] - self.extents[d]
            offset.sub_(row, alpha=shorter * math.prod(self.extents[d + 1 :]))
        return offset

    def in_image(self, offsets: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return offsets inside windows as indices into the image.

        No maximum is outside, but the kernel that is given them writes wherever they say.
        """
        index = offsets + starts
        for d in range(1, len(self.sizes)):
            row = offsets.div(math.prod(self.extents[d:]), rounding_mode="floor")
            longer = self.sizes[d] - self.extents[d]
            index.add_(row.to(torch.int64), alpha=longer * math.prod(self.sizes[d + 1 :]))
        return index.clamp_(0, math.prod(self.sizes) - 1)


def offsets(indices: torch.Tensor, windows: Windows) -> torch.Tensor:
    """Return for each maximum its offset inside its window.

    `indices` [..., height, width] (or [..., depth, height, width]): places in the image, as pooling
    returns them.
    """
    if runs_on(indices) and indices.is_contiguous():
        from tightfit.alternatives.kernels.max_pool import offsets_of

        return offsets_of(indices, *windows.places)
    made = torch.empty_like(indices, dtype=torch.uint8)
    starts = windows.starts(indices.shape[-len(windows.sizes) :], indices.device)
    for part in _parts(indices):
        made[part].copy_(windows.within(indices[part], starts))
    return made


def gradient_from_offsets(
    gradient: torch.Tensor,
    offsets: torch.Tensor,
    windows: Windows,
    strides: tuple[int, ...],
    *arguments: Any,
) -> torch.Tensor:
    """Return the gradient of the image.

    `gradient` [..., height, width] (or [..., depth, height, width]): of the maxima. `offsets`: from
    `offsets`. `arguments`: kernel, strides, padding, dilation and rounding, as the operator takes
    them.
    """
    dimensions = len(windows.sizes)
    shape = (*gradient.shape[:-dimensions], *windows.sizes)
    made = torch.empty_strided(shape, strides, dtype=gradient.dtype, device=gradient.device)
    if runs_on(gradient) and all(t.is_contiguous() for t in (gradient, offsets, made)):
        from tightfit.alternatives.kernels.max_pool import gradient_of_image

        return gradient_of_image(gradient, offsets, *windows.places, out=made)
    starts = windows.starts(gradient.shape[-dimensions:], gradient.device)
    for part in _parts(offsets):
        image = made[part]  # also passed as the image, of which only the shape is read
        places = windows.in_image(offsets[part], starts)
        _WRITING[dimensions](gradient[part], image, *arguments, places, grad_input=image)
    return made


def _parts(places: torch.Tensor) -> Iterator[slice]:
    """Yield a few images of the batch, or channels of one image, at a time."""
    at_once = _ON_CPU if places.device.type == "cpu" else _ON_GPU
    return slices(places.shape[0], max(1, at_once * places.shape[0] // places.numel()))


def max_pool_gradient(view: OpView) -> Extension | None:
    """Offer the gradient of a max-pooling from offsets, where a window has at most 256 places."""
    gradient, _, *arguments, indices = arguments_of(view.node)
    forward = view.maker_of(indices, (_FORWARD[view.node.target],))
    made = view.node.meta["val"]
    windows = _windows(made, *arguments)
    if forward is None or windows is None or not made.numel():
        return None
    made_offsets = torch.empty_like(indices.meta["val"], dtype=torch.uint8)
    extra = view.extra("max_pool.offsets", offsets, indices, windows, made=made_offsets)
    args = (gradient, extra.node, windows, tuple(made.stride()), *arguments)
    offer = Implementation(
        "max_pool.from_offsets", gradient_from_offsets, args, rests_on=(forward,), by_rows=True
    )
    return Extension((offer,), extras=(extra,))


def _windows(
    image: torch.Tensor, kernel: Any, strides: Any, padding: Any, dilation: Any, _: bool
) -> Windows | None:
    """Return the windows' positions; None if an offset has no room in a byte or may leave a row."""
    count = 3 if len(kernel) == 3 or len(padding) == 3 else 2
    sizes = tuple(image.shape[-count:])
    kernel, strides, padding, dilation = (
        tuple(x) * (count if len(x) == 1 else 1)
        for x in (kernel, strides or kernel, padding, dilation)
    )
    extents = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True))
    fits = all(e <= size for e, size in zip(extents, sizes, strict=True))
    if not fits or math.prod(extents) > _BYTE:
        return None
    return Windows(sizes, extents, strides, padding)
