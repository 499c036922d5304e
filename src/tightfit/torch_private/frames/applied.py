"""Functions of autograd that users wrote, in a graph of Dynamo's that runs as it is.

Dynamo's operator makes a class for each call, which holds what the backward reads until Python
collects garbage. Plain PyTorch frees saved tensors at the backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._functorch.autograd_function import autograd_function_apply

_SAVED = "saved_for_backward_idx"  # from PyTorch 2.13 on; before, the operator runs by itself


def is_applied_function(node: fx.Node) -> bool:
    """Whether a node applies a function of autograd that holds tensors for too long."""
    return node.target is autograd_function_apply and _SAVED in node.kwargs


def apply_function(args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Apply a function of autograd as plain PyTorch does, with the arguments of its operator."""
    forward, backward, *given = args
    return _Applied.apply(forward, backward, named, *given)


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        named: Mapping[str, Any],
        *given: Any,
    ) -> Any:
        output, values = fx.Interpreter(forward).run(*given)
        returned = output if isinstance(output, tuple | list) else (output,)
        if dirty := named.get("dirty_idx"):
            ctx.mark_dirty(*(returned[i] for i in dirty))
        if fixed := named["non_differentiable_idx"]:
            ctx.mark_non_differentiable(*(returned[i] for i in fixed))
        saved = {i for i in named[_SAVED] if isinstance(values[i], torch.Tensor)}
        ctx.save_for_backward(*(values[i] for i in sorted(saved)))
        ctx.rest = {i: value for i, value in enumerate(values) if i not in saved}
        ctx.run = backward
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved = iter(ctx.saved_tensors)
        count = len(ctx.saved_tensors) + len(ctx.rest)
        values = [ctx.rest[i] if i in ctx.rest else next(saved) for i in range(count)]
        found = fx.Interpreter(ctx.run).run(*gradients, *values)
        return (None, None, None, *(found if isinstance(found, tuple | list) else (found,)))
