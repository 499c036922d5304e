"""Bits of tensors, and the differences between tensors of two runs."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy
import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type by the bytes of an element."""


def digest_of(tensor: torch.Tensor) -> bytes:
    """Return a hash of the bits of a tensor, or of the indices and values of a sparse tensor.

    Nothing is requested from PyTorch's allocator, whose allocations may be counted.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
        digest.update(numpy.ascontiguousarray(_as_integers(part)))
    return digest.digest()


def is_zero(gradient: torch.Tensor) -> bool:
    """Whether all numbers of a gradient are zero; requests nothing from the allocator, either."""
    integers = _as_integers(gradient._values() if gradient.is_sparse else gradient)
    return not numpy.left_shift(integers, 1).any()  # without the sign


def _as_integers(tensor: torch.Tensor) -> Any:
    """Return the numbers of a tensor as integers of the same bits."""
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return numbers.detach().view(_INTEGERS[numbers.element_size()]).cpu().numpy()


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest magnitude of its kind of tensor.

    The kind is the first word of a name: gradient, parameter, buffer. Infinite if the names differ.
    """
    if a.keys() != b.keys():
        return math.inf
    largest = 0.0
    scale: dict[str, float] = {}
    for key, tensor in a.items():
        kind = key.split()[0]
        if tensor.is_floating_point() and tensor.numel():
            scale[kind] = max(scale.get(kind, 0.0), float(_dense(tensor).abs().max()))
    for key, tensor in a.items():
        if tensor.is_floating_point() and tensor.numel():
            difference = float((_dense(tensor) - _dense(b[key])).abs().max())
            largest = max(largest, difference / (scale[key.split()[0]] or 1.0))
    return largest


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor
