"""What leaves PyTorch and comes back while a step is traced: lists of numbers.

`torch.tensor([a, b])` and `tolist()` read values in C++, where traced tensors have none and no
mode sees it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tightfit.torch_private import core as private

__all__ = ["NumbersAskedFor"]


class NumbersAskedFor(TorchFunctionMode):
    """Lets values of traced tensors be read number by number, and lists of tensors be stacked."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.tolist and _is_traced(args[0]):
            return _numbers(args[0])
        if func in (torch.tensor, torch.as_tensor) and args:
            data, *others = args
            if not isinstance(data, list | tuple):
                return func(*args, **kwargs)
            leaves = private.pytree.tree_leaves(data)
            if any(map(_is_traced, leaves)):
                return func(_without_lists(data, leaves), *others, **kwargs)
        return func(*args, **kwargs)


def _is_traced(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and private.is_tracing() and private.is_traced(value)


def _numbers(tensor: torch.Tensor) -> Any:
    return tensor.item() if tensor.dim() == 0 else [_numbers(each) for each in tensor.unbind()]


def _without_lists(data: Any, leaves: list[Any]) -> Any:
    """Return a list of tensors as one tensor; of tensors and numbers, as a list of numbers."""
    kinds = {(x.dtype, x.device) if isinstance(x, torch.Tensor) else None for x in leaves}
    if len(kinds) == 1:
        return _stacked(data).detach()
    return private.pytree.tree_map(lambda x: x.item() if isinstance(x, torch.Tensor) else x, data)


def _stacked(data: Any) -> torch.Tensor:
    return data if isinstance(data, torch.Tensor) else torch.stack([_stacked(x) for x in data])
