"""Empty tensors that a forward gives a size (`x.new().resize_(n)`), as older code makes masks."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tightfit.errors import CaptureError
from tightfit.torch_private import core as private

__all__ = ["ResizedTensors"]


class ResizedTensors(TorchFunctionMode):
    """Gives an empty traced tensor other memory where it is to grow: what it has cannot."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.resize_, torch.Tensor.resize_as_) and _is_plain(args[0]):
            tensor, *wanted = args
            if func is torch.Tensor.resize_as_:
                wanted = [wanted[0].shape]
            options = {"dtype": tensor.dtype, "device": tensor.device}
            anew = torch.empty(*wanted, **options, **kwargs)
            if tensor.numel() == 0:
                tensor.set_(anew)
            if tensor.numel() < anew.numel():
                raise CaptureError(
                    f"the forward pass gives a tensor of shape {tuple(tensor.shape)} the shape "
                    f"{tuple(anew.shape)} (resize_), which a planned step cannot. Way out: make it "
                    "as large as it will be before the model is fitted (run the model once)",
                    cause="state",  # may be set up the first time
                )
            return tensor if tensor.shape == anew.shape else func(*args, **kwargs)
        return func(*args, **kwargs)


def _is_plain(tensor: Any) -> bool:
    return private.is_traced(tensor) and not tensor.requires_grad
