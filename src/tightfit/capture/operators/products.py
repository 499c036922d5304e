"""Products of all elements (`torch.prod`) in a trace, with the gradient of plain PyTorch.

Its gradient divides the product by each element, unless one of them is zero. A tracer does not know
the elements and computes other products instead, which differ in their last bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_LIBRARY = torch.library.Library("tightfit", "FRAGMENT")
_LIBRARY.define(
    "product_gradient(Tensor gradient, Tensor x, int? dim, bool keepdim, ScalarType? dtype)"
    " -> Tensor"
)


class TracedProducts(TorchFunctionMode):
    """Lets products be operators whose gradient is one operator, too."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.prod, torch.Tensor.prod):
            given = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | kwargs
            x = given.get("input")
            if isinstance(x, torch.Tensor) and x.requires_grad and "out" not in given:
                options = given.get("dim"), given.get("keepdim", False), given.get("dtype")
                return _Product.apply(x, *options)
        return func(*args, **kwargs)


def _product(
    x: torch.Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None
) -> torch.Tensor:
    if dim is None:
        return torch.ops.aten.prod.default(x, dtype=dtype)
    return torch.ops.aten.prod.dim_int(x, dim, keepdim, dtype=dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, dim: Any, keepdim: Any, dtype: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.options = dim, keepdim, dtype
        return _product(x, dim, keepdim, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        found = torch.ops.tightfit.product_gradient(gradients[0], x, *ctx.options)
        return found, None, None, None


@torch.library.impl(_LIBRARY, "product_gradient", "CompositeExplicitAutograd")
def _gradient(
    gradient: torch.Tensor, x: torch.Tensor, dim: Any, keepdim: bool, dtype: Any
) -> torch.Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(_product(leaf, dim, keepdim, dtype), leaf, gradient)[0]


@torch.library.register_fake("tightfit::product_gradient")
def _fake_gradient(
    gradient: torch.Tensor, x: torch.Tensor, dim: Any, keepdim: bool, dtype: Any
) -> torch.Tensor:
    return torch.empty_like(x)
