"""Inputs that are views of one tensor that a step writes: the part that each of them views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from tightfit.torch_private import core as private

SharedViews: TypeAlias = tuple[tuple[int, ...], tuple[tuple[Any, ...], ...]]
"""The positions of some inputs, and the geometry of each in the tensor that all of them view."""


def shared_views(leaves: Sequence[Any], index: int) -> SharedViews:
    """Return the inputs that view the same tensor as one of them."""
    base = private.viewed(leaves[index])
    found = [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and private.viewed(leaf) is base
    ]
    return tuple(found), tuple(_place(leaves[i], base) for i in found)


def view_alike(leaves: Sequence[Any], shared: SharedViews) -> bool:
    """Whether the same inputs of another call view one tensor in the same way."""
    positions, places = shared
    return shared_views(leaves, positions[0]) == (positions, places)


def _place(tensor: torch.Tensor, base: torch.Tensor) -> tuple[Any, ...]:
    before = (tuple(base.shape), base.stride(), base.storage_offset(), base.requires_grad)
    return (tensor.storage_offset(), *before)
