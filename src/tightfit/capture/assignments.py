"""Tensors that a forward puts in the place of others: what it means is that it writes into them.

`weight.data = value` and `self.buffer = value` exchange tensors in Python, where no tracer sees
it. While a step is traced they become writes into the tensor that was there, which every step
then does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tightfit.errors import CaptureError
from tightfit.torch_private import core as private

__all__ = ["DataAssignments", "members_of", "write_replaced"]

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class DataAssignments(TorchFunctionMode):
    """Lets `tensor.data = value` write into the tensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func != _SET_DATA or not private.is_tracing() or not private.is_traced(args[0]):
            return func(*args, **(kwargs or {}))
        tensor, value = args
        if not _alike(tensor, value):
            raise CaptureError(
                f"the forward pass gives a tensor of shape {list(tensor.shape)} other data, of "
                f"shape {list(value.shape)}. Way out: keep the shape and the dtype, or do it "
                "outside the fitted module"
            )
        if private.storage_key(value) != private.storage_key(tensor):
            with torch.no_grad():  # seen by autograd: nobody's backward may read it any more
                tensor.copy_(value)
        return None


def _alike(a: torch.Tensor, b: Any) -> bool:
    return isinstance(b, torch.Tensor) and (a.shape, a.dtype, a.device) == (
        b.shape,
        b.dtype,
        b.device,
    )


def members_of(module: nn.Module) -> dict[str, Any]:
    """Return parameters and buffers by name, those of shared modules under each name."""
    return {
        f"{name}.{key}".lstrip("."): tensor
        for name, child in module.named_modules(remove_duplicate=False)
        for kept in (child._parameters, child._buffers)
        for key, tensor in kept.items()
    }


def write_replaced(module: nn.Module, before: Mapping[str, Any]) -> None:
    """Write what stands in the place of a buffer into the buffer, and put that back.

    Parameters
    ----------
    module : nn.Module
        Whose forward has run.
    before : mapping of str to tensor
        Its parameters and buffers before.

    Raises
    ------
    CaptureError
        If a parameter was replaced, or a buffer by something else than a tensor like it.
    """
    after = members_of(module)
    for key in [key for key in before if after.get(key) is not before[key]]:
        path, _, name = key.rpartition(".")
        owner = module.get_submodule(path)
        old, new = before[key], after.get(key)
        if name not in owner._buffers or old is None or not _alike(old, new):
            raise CaptureError(
                f"the forward pass puts another tensor in the place of {key}. A planned step "
                "replays operators, not Python, so this would silently stop happening. Way out: "
                f"write into it (self.{name}.copy_(...)). The model is unchanged"
            )
        with torch.no_grad():
            old.copy_(new)
        owner._buffers[name] = old
