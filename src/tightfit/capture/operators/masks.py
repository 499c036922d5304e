"""Assignments by a mask (`x[mask] = y`), traced as assignments by the mask's places.

Their backward selects from a gradient by the same mask, so that it asks how much the mask selects.
Nobody may ask in a backward, as another answer has to end the forward before it has changed
anything. So the forward asks for the places, and the backward gathers them. A real run that is
asked what it is told does the same, in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["MasksAskedFor"]

_ASSIGNMENTS = (
    torch.Tensor.__setitem__,
    torch.Tensor.index_put,
    torch.Tensor.index_put_,
    torch.index_put,
    torch.index_put_,
)


class MasksAskedFor(TorchFunctionMode):
    """Lets tensors be assigned by the places where a mask holds."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ASSIGNMENTS:
            given = dict(zip(("input", "indices", "values"), args, strict=False)) | kwargs
            if _is_differentiable(given.get("values")) and "indices" in given:
                given["indices"] = _places(given["indices"])
                first, indices, values = (given.pop(k) for k in ("input", "indices", "values"))
                return func(first, indices, values, *args[3:], **given)
        return func(*args, **kwargs)


def _is_differentiable(values: Any) -> bool:
    return isinstance(values, torch.Tensor) and (values.is_floating_point() or values.is_complex())


def _places(index: Any) -> Any:
    """Return an index with the places of each mask in the mask's stead."""
    if _is_mask(index):
        return index.nonzero(as_tuple=True)
    if not isinstance(index, tuple | list) or not any(map(_is_mask, index)):
        return index
    return tuple(
        place
        for each in index
        for place in (each.nonzero(as_tuple=True) if _is_mask(each) else (each,))
    )


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype is torch.bool and index.dim() > 0
