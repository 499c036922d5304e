"""Convolutions a few images of the batch at a time: a smaller workspace (mu-cuDNN's idea).

On a CPU a convolution takes images apart into blocks of channels and puts its result together
again. That takes memory of its own, as large as its input and result together. A few images at a
time need a share of that. Kernels are chosen by size, and for images of some size they are the same
for any number of images, so that the output has the same bits. Where they differ, the comparison on
the device says so. The gradient of the weight is a sum over images, which rounds differently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tightfit.alternatives.base import Extension, Implementation, OpView, slices
from tightfit.capture.nodes import storage_bytes

aten = torch.ops.aten

_LARGE_SHARE = 0.25  # of the largest convolution of the step: below, its workspace matters little
_LARGE_BYTES = 1 << 20
_PARTS = 4  # of a batch; single images are tried, too


def convolved_by_images(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    at_once: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    *geometry: Any,
) -> torch.Tensor:
    """Return a convolution, made of so many images at once.

    `x`, `weight`, `bias`: as in ``convolution``. `geometry`: as in ``convolution``.
    """
    made = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
    for part in slices(shape[0], at_once):
        made[part].copy_(aten.convolution.default(x[part], weight, bias, *geometry))
    return made


def gradients_by_images(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    at_once: int,
    strides: tuple[int, ...],
    *rest: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of a convolution's input, weight and bias, of so many images at once.

    `gradient`, `x`, `weight`: as in ``convolution_backward``. `strides`: of the gradient of the
    input. `rest`: as in ``convolution_backward``; gradients that its mask leaves out are None.
    """
    of_x = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    sums: list[torch.Tensor | None] = []
    for part in slices(x.shape[0], at_once):
        its_x, *others = aten.convolution_backward.default(gradient[part], x[part], weight, *rest)
        of_x[part].copy_(its_x)
        for total, addend in zip(sums, others, strict=False):
            if total is not None:
                total.add_(addend)
        sums = sums or others
    return (of_x, *sums)


def convolution_by_images(view: OpView) -> Extension | None:
    """Offer a large convolution by images, on a CPU."""
    x, weight, bias, *geometry = view.call.args
    value = view.node.meta["val"]
    if not _is_offered(view, weight, value.shape[0]):
        return None
    where = tuple(value.shape), tuple(value.stride())
    return Extension(
        tuple(
            Implementation(
                f"convolution.by_images_{at_once}",
                convolved_by_images,
                (x, weight, bias, at_once, *where, *geometry),
                compiles=False,
            )
            for at_once in _sizes(value.shape[0])
        )
    )


def gradients_of_convolution_by_images(view: OpView) -> Extension | None:
    """Offer the gradients of a large convolution by images, on a CPU; that of the weight rounds."""
    gradient, x, weight, *rest = view.call.args
    of_x = view.node.meta["val"][0]
    if of_x is None or not _is_offered(view, weight, of_x.shape[0]):
        return None
    return Extension(
        tuple(
            Implementation(
                f"convolution.gradients_by_images_{at_once}",
                gradients_by_images,
                (gradient, x, weight, at_once, tuple(of_x.stride()), *rest),
                exactness="rounding",
                compiles=False,
            )
            for at_once in _sizes(of_x.shape[0])
        )
    )


def _sizes(images: int) -> tuple[int, ...]:
    return (1, images // _PARTS) if images >= 2 * _PARTS else (1,)


def _is_offered(view: OpView, weight: fx.Node, images: int) -> bool:
    """Whether an op has several images, on a CPU, and moves about as much as the largest.

    Windows of one pixel need no workspace.
    """
    window = weight.meta["val"].shape[2:]
    if not view.runs_on_cpu or images < 2 or len(window) < 2 or {*window} == {1}:
        return False
    alike = (n for n in view.captured.nodes if n.target is view.node.target)
    least = max(_LARGE_BYTES, _LARGE_SHARE * max(map(_moved_bytes, alike)))
    return _moved_bytes(view.node) >= least


def _moved_bytes(node: fx.Node) -> int:
    """Return the bytes of the first argument and of the first result."""
    value = node.meta["val"]
    first = value[0] if isinstance(value, tuple | list) else value
    made = 0 if first is None else storage_bytes(first)
    return made + storage_bytes(node.args[0].meta["val"])  # type: ignore[union-attr]
