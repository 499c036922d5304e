"""Floating-point operations of a traced operator, by PyTorch's own formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry


def flops_of(node: fx.Node) -> int:
    """Return the floating-point operations of an operator; 0 where no formula is known."""
    packet = getattr(node.target, "overloadpacket", None)
    count = flop_registry.get(packet)
    if count is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    try:
        if packet is torch.ops.aten.convolution_backward:
            return _convolution_backward_flops(args)
        return int(count(*args, **kwargs, out_val=node.meta["val"]))
    except (TypeError, IndexError, AttributeError, AssertionError):
        return 0


def _convolution_backward_flops(args: tuple[Any, ...]) -> int:
    """As many as the forward for each of the two gradients asked for.

    PyTorch's own formula counts the weight's gradient as if there was one group.
    """
    gradient, x, weight, _, *geometry, mask = args
    forward = flop_registry[torch.ops.aten.convolution]
    return int(forward(x, weight, None, *geometry, out_val=gradient)) * sum(mask[:2])
