"""The short way to an operator: PyTorch's own function for it, where that runs just that operator.

A call through ``torch.ops`` compares its arguments with the operator's schema one by one, which
takes a microsecond or two. The functions that PyTorch compiles for Python take half of that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

DIRECT: dict[Any, Any] = {
    aten._log_softmax.default: torch._log_softmax,
    aten._log_softmax_backward_data.default: torch._log_softmax_backward_data,
    aten._softmax.default: torch._softmax,
    aten._softmax_backward_data.default: torch._softmax_backward_data,
    aten.add.Tensor: torch.add,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.convolution.default: torch.convolution,
    aten.div.Tensor: torch.div,
    aten.embedding.default: torch.embedding,
    aten.gelu.default: torch._C._nn.gelu,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.permute.default: torch.permute,
    aten.relu.default: torch.relu,
    aten.reshape.default: torch.reshape,
    aten.sigmoid.default: torch.sigmoid,
    aten.silu.default: torch._C._nn.silu,
    aten.sub.Tensor: torch.sub,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.tanh.default: torch.tanh,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
}
"""By operator: the function that runs it, for all arguments that the operator takes."""


def direct(function: Any) -> Any:
    """Return a direct entry to an operator of a planned step; the same where there is none."""
    if type(function) is OpOverload:
        return DIRECT.get(function, function._op)  # which a call of it calls
    return function
