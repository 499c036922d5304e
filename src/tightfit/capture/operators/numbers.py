"""What leaves PyTorch and comes back while a step is traced: lists of numbers, arrays.

`torch.tensor([a, b])` and `tolist()` read values in C++, where traced tensors have none and no
mode sees it. A real run that is asked what it is told does the same, in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tightfit.capture.operators.matching import TracedArray
from tightfit.torch_private import core as private

__all__ = ["NumbersAskedFor"]


class NumbersAskedFor(TorchFunctionMode):
    """Lets values be read number by number, and lists of tensors be stacked.

    Parameters
    ----------
    tracing : bool
        Whether a step is traced; only traced tensors are treated so then.
    """

    def __init__(self, *, tracing: bool) -> None:
        super().__init__()
        self._tracing = tracing

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.tolist and self._is_watched(args[0]):
            return _numbers(args[0])
        if func is torch.nn.functional.one_hot and not self._tracing:
            return _one_hot(*args, **kwargs)
        if func is torch.Tensor.numpy and self._tracing and self._is_watched(args[0]):
            return TracedArray(args[0])
        if func in (torch.tensor, torch.as_tensor) and args:
            data, *others = args
            if isinstance(data, TracedArray):
                return torch.as_tensor(data.tensor.detach(), *others, **kwargs)
            if not isinstance(data, list | tuple):
                return func(*args, **kwargs)
            leaves = private.pytree.tree_leaves(data)
            if any(self._is_watched(x) for x in leaves):
                return func(_without_lists(data, leaves), *others, **kwargs)
        return func(*args, **kwargs)

    def _is_watched(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        return not self._tracing or (private.is_tracing() and private.is_traced(value))


def _numbers(tensor: torch.Tensor) -> Any:
    return tensor.item() if tensor.dim() == 0 else [_numbers(each) for each in tensor.unbind()]


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Do what the operator does while it is traced: it asks for no values but the largest."""
    if num_classes < 0:
        num_classes = int(tensor.max().item()) + 1
    classes = torch.arange(num_classes, device=tensor.device)
    return (tensor.unsqueeze(-1) == classes).to(torch.int64)


def _without_lists(data: Any, leaves: list[Any]) -> Any:
    """Return a list of tensors as one tensor; of tensors and numbers, as a list of numbers."""
    kinds = {(x.dtype, x.device) if isinstance(x, torch.Tensor) else None for x in leaves}
    if len(kinds) == 1:
        return _stacked(data).detach()
    return private.pytree.tree_map(lambda x: x.item() if isinstance(x, torch.Tensor) else x, data)


def _stacked(data: Any) -> torch.Tensor:
    return data if isinstance(data, torch.Tensor) else torch.stack([_stacked(x) for x in data])
