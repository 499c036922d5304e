"""Tensors made of lists that hold tensors: `torch.tensor([a, b])` while a step is traced.

The constructor reads each tensor's value in C++, where traced tensors have none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tightfit.capture import _torch as private

__all__ = ["TensorsOfTensors"]


class TensorsOfTensors(TorchFunctionMode):
    """Stacks the tensors of a list where `torch.tensor` would read them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and args and private.is_tracing():
            data, *others = args
            if isinstance(data, list | tuple):
                leaves = private.pytree.tree_leaves(data)
                if any(isinstance(x, torch.Tensor) and private.is_traced(x) for x in leaves):
                    return func(_without_lists(data, leaves), *others, **kwargs)
        return func(*args, **kwargs)


def _without_lists(data: Any, leaves: list[Any]) -> Any:
    """Return a list of tensors as one tensor; of tensors and numbers, as a list of numbers."""
    kinds = {(x.dtype, x.device) if isinstance(x, torch.Tensor) else None for x in leaves}
    if len(kinds) == 1:
        return _stacked(data).detach()
    return private.pytree.tree_map(lambda x: x.item() if isinstance(x, torch.Tensor) else x, data)


def _stacked(data: Any) -> torch.Tensor:
    return data if isinstance(data, torch.Tensor) else torch.stack([_stacked(x) for x in data])
