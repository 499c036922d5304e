"""Empty tensors that a forward gives a size (`x.new().resize_(n)`), as older code makes masks."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tightfit.torch_private import core as private

__all__ = ["ResizedTensors"]


class ResizedTensors(TorchFunctionMode):
    """Gives an empty traced tensor other memory where it is to grow: what it has cannot."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.resize_, torch.Tensor.resize_as_) and _is_empty(args[0]):
            tensor, *wanted = args
            if func is torch.Tensor.resize_as_:
                wanted = [wanted[0].shape]
            options = {"dtype": tensor.dtype, "device": tensor.device}
            return tensor.set_(torch.empty(*wanted, **options, **kwargs))
        return func(*args, **kwargs)


def _is_empty(tensor: Any) -> bool:
    return private.is_traced(tensor) and tensor.numel() == 0 and not tensor.requires_grad
