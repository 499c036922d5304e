"""Assignments by a mask (`x[mask] = y`), with gradients whose sizes are known.

Their backward selects from a gradient by the same mask: how much that is depends on the mask's
values, which a tracer does not know. The assigned values tell it, if there is a row for each place
that is selected: the places are looked up then. One value for all places gets its gradient from one
operator, which selects and adds up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten

_LIBRARY = torch.library.Library("tightfit", "FRAGMENT")
_LIBRARY.define("put_gradient(Tensor gradient, Tensor?[] indices, SymInt[] shape) -> Tensor")
_LIBRARY.define("places(Tensor mask, SymInt count) -> Tensor")
put_gradient = torch.ops.tightfit.put_gradient.default
places = torch.ops.tightfit.places.default

_IN_PLACE = (torch.Tensor.index_put_, torch.index_put_)
_PUTS = (torch.Tensor.index_put, torch.index_put, *_IN_PLACE)
_MASKS = (torch.bool, torch.uint8)
_BASIC = (int, slice, type(None), type(Ellipsis))


class MaskedAssignments(TorchFunctionMode):
    """Lets the gradients of values assigned by masks be of known sizes."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__setitem__ and _is_differentiated(args[2]):
            found = _without_slices(args[0], args[1])
            if found is not None:
                values = _without_leading_ones(args[2])
                _assign(aten.index_put_.default, *found, values, accumulate=False)
                return None
        if func in _PUTS:
            names = "input", "indices", "values", "accumulate"
            given = dict(zip(names, args, strict=False)) | kwargs
            indices, values = given.get("indices", ()), given.get("values")
            if _is_differentiated(values) and any(map(_is_mask, indices)):
                adds = given.get("accumulate", False)
                put = aten.index_put_.default if func in _IN_PLACE else aten.index_put.default
                return _assign(put, given["input"], indices, values, accumulate=adds)
        return func(*args, **kwargs)


def _assign(
    put: Any,
    x: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    *,
    accumulate: bool,
) -> torch.Tensor:
    """Do the same as ``index_put``; `put`: its operator, in place or not."""
    count = rows_of(x.dim(), indices, values.shape)
    if count is None:
        found = _Put.apply(x, values, accumulate, *indices)
        return x.copy_(found) if put is aten.index_put_.default else found
    by_places: list[torch.Tensor | None] = []
    for index in indices:
        by_places += places(index, count).unbind(1) if _is_mask(index) else [index]
    return put(x, by_places, values, accumulate)


def rows_of(
    dimensions: int, indices: Sequence[torch.Tensor | None], shape: Sequence[int]
) -> int | None:
    """Return how many places masks select, if the value assigned there tells it."""
    tensors = [i for i, index in enumerate(indices) if index is not None]
    found = [index for index in indices if index is not None]
    for index in found:
        if not _is_mask(index) and index.numel() > 1:
            return index.numel()
    behind = dimensions - sum(map(_dimensions, found))
    if tensors[-1] - tensors[0] == len(tensors) - 1:  # side by side: they stay where they are
        behind -= tensors[0]
    has_rows = len(shape) > behind and shape[-1 - behind] != 1
    return shape[-1 - behind] if has_rows else None


def _is_differentiated(values: Any) -> bool:
    return isinstance(values, torch.Tensor) and values.requires_grad


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in _MASKS and index.dim() > 0


def _without_slices(
    tensor: torch.Tensor, index: Any
) -> tuple[torch.Tensor, list[torch.Tensor | None]] | None:
    """Return the tensor that an index with masks is applied to, and the index; None: no masks."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_mask, parts)) or not all(map(_is_known, parts)):
        return None
    named = sum(_dimensions(part) for part in parts)
    basic: list[Any] = []
    indices: list[torch.Tensor | None] = []
    for part in parts:
        if isinstance(part, torch.Tensor):
            basic += [slice(None)] * _dimensions(part)
            indices.append(part)
        elif part is Ellipsis:
            basic += [slice(None)] * (tensor.dim() - named)
            indices += [None] * (tensor.dim() - named)
        else:
            basic.append(part)
            indices += [None] * (not isinstance(part, int))
    whole = all(isinstance(part, slice) and part == slice(None) for part in basic)
    return tensor if whole else tensor[tuple(basic)], indices


def _is_known(part: Any) -> bool:
    if isinstance(part, torch.Tensor):
        return part.dim() > 0
    return isinstance(part, _BASIC) and not isinstance(part, bool)


def _dimensions(part: Any) -> int:
    """Return how many dimensions of a tensor a part of an index names."""
    if _is_mask(part):
        return part.dim()
    return 0 if part is None or part is Ellipsis else 1


def _without_leading_ones(values: torch.Tensor) -> torch.Tensor:
    """Return values as an assignment takes them: dimensions of one in front do not count."""
    ones = next((i for i, size in enumerate(values.shape) if size != 1), values.dim())
    return values.view(values.shape[ones:]) if ones else values


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, values: Any, accumulate: Any, *indices: Any) -> Any:
        ctx.accumulate, ctx.shape = accumulate, values.shape
        ctx.places = [i for i, index in enumerate(indices) if index is not None]
        ctx.count = len(indices)
        ctx.save_for_backward(*(index for index in indices if index is not None))
        return aten.index_put.default(x, indices, values, accumulate)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        indices: list[Any] = [None] * ctx.count
        for place, index in zip(ctx.places, ctx.saved_tensors, strict=True):
            indices[place] = index
        of_input = None
        if ctx.needs_input_grad[0]:
            of_input = gradient
            if not ctx.accumulate:
                nothing = gradient.new_zeros(())
                of_input = aten.index_put.default(gradient, indices, nothing)
        found = put_gradient(gradient, indices, ctx.shape)
        return of_input, found, None, *[None] * ctx.count


@torch.library.impl(_LIBRARY, "put_gradient", "CompositeExplicitAutograd")
def _gradient(
    gradient: torch.Tensor, indices: Sequence[torch.Tensor | None], shape: Sequence[int]
) -> torch.Tensor:
    return aten.index.Tensor(gradient, indices).sum_to_size(shape)


@torch.library.register_fake("tightfit::put_gradient")
def _fake_gradient(
    gradient: torch.Tensor, indices: Sequence[torch.Tensor | None], shape: Sequence[int]
) -> torch.Tensor:
    return gradient.new_empty(shape)


@torch.library.impl(_LIBRARY, "places", "CompositeExplicitAutograd")
def _places(mask: torch.Tensor, count: int) -> torch.Tensor:
    return mask.nonzero()


@torch.library.register_fake("tightfit::places")
def _fake_places(mask: torch.Tensor, count: int) -> torch.Tensor:
    return mask.new_empty((mask.dim(), count), dtype=torch.int64).t()
