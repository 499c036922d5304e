"""Empty tensors that a forward gives a size (`x.new().resize_(n)`), as older code makes masks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tightfit.errors import CaptureError
from tightfit.torch_private import core as private

__all__ = ["ResizedTensors"]


class ResizedTensors(TorchFunctionMode):
    """Gives an empty traced tensor other memory where it is to grow: its own cannot.

    `members`: parameters and buffers, as they are traced: they cannot grow.
    """

    def __init__(self, members: Iterable[torch.Tensor | None]) -> None:
        super().__init__()
        self._members = {id(member): member for member in members}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.resize_, torch.Tensor.resize_as_) and self._may_grow(args[0]):
            tensor, *wanted = args
            if func is torch.Tensor.resize_as_:
                wanted = [wanted[0].shape]
            options = {"dtype": tensor.dtype, "device": tensor.device}
            new = torch.empty(*wanted, **options, **kwargs)
            if id(tensor) in self._members and tensor.numel() < new.numel():
                raise _grows(tensor, new)
            if tensor.numel() == 0:
                return tensor.set_(new)
        return func(*args, **kwargs)

    def _may_grow(self, tensor: Any) -> bool:
        is_asked = private.is_traced(tensor) and not tensor.requires_grad
        return is_asked and (tensor.numel() == 0 or id(tensor) in self._members)


def _grows(tensor: torch.Tensor, new: torch.Tensor) -> CaptureError:
    return CaptureError(
        f"the forward pass gives a buffer of shape {tuple(tensor.shape)} the shape "
        f"{tuple(new.shape)} (resize_), which a planned step cannot. Way out: make it as large as "
        "it will be before the model is fitted (run the model once)",
    )
