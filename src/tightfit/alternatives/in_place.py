"""Operators that may write their result over an argument nobody reads any more.

Which argument is free to be overwritten depends on the plan; the planner, the verifier and the
lowered program share one rule: equal size, last reader, kept by nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tightfit.alternatives.base import Extension, OpView
from tightfit.capture.captured import Call
from tightfit.capture.nodes import base_of, storage_bytes
from tightfit.graph.ir import Alternative

__all__ = ["IN_PLACE", "Overwriter", "in_place"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Overwriter:
    """How an operator runs over one of its arguments.

    Parameters
    ----------
    function : callable
        The in-place or ``out=`` form.
    position : int
        The argument that is overwritten.
    keyword : str or None
        The ``out=`` keyword; None: the function writes over its first argument.
    swap : bool
        The operator is commutative and the overwritten argument must come first.
    """

    function: Callable[..., Any]
    position: int = 0
    keyword: str | None = None
    swap: bool = False


def _first(function: Callable[..., Any]) -> tuple[Overwriter, ...]:
    return (Overwriter(function),)


def _gradient(function: Callable[..., Any]) -> tuple[Overwriter, ...]:
    return (Overwriter(function, keyword="grad_input"),)


def add_over_second(second: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Return first + second, written over the second unless the sum would be laid out otherwise.

    Kernels may choose another layout than the trace saw (of images of one pixel, say), and the
    layout of a sum, which the kernels after it depend on, is that of its first full argument.
    """
    return second.add_(first) if _decides_layout(second, first) else first + second


def mul_over_second(second: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Return first * second as `add_over_second` does the sum."""
    return second.mul_(first) if _decides_layout(second, first) else first * second


def _decides_layout(second: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether first + second is laid out as the second: the first is alike or only broadcast.

    A sum is dense, its dimensions in the order of the first argument's strides.
    """
    if first.shape != second.shape or 0 in first.stride():
        return True
    return _stride_order(first) == _stride_order(second)


def _stride_order(tensor: torch.Tensor) -> list[int]:
    dimensions = [d for d, size in enumerate(tensor.shape) if size > 1]
    return sorted(dimensions, key=tensor.stride, reverse=True)


IN_PLACE: dict[Any, tuple[Overwriter, ...]] = {
    aten.relu.default: _first(aten.relu_.default),
    aten.hardtanh.default: _first(aten.hardtanh_.default),
    aten.leaky_relu.default: _first(aten.leaky_relu_.default),
    aten.sigmoid.default: _first(aten.sigmoid_.default),
    aten.tanh.default: _first(aten.tanh_.default),
    aten.add.Tensor: (
        Overwriter(aten.add_.Tensor),
        Overwriter(add_over_second, position=1, swap=True),
    ),
    aten.mul.Tensor: (
        Overwriter(aten.mul_.Tensor),
        Overwriter(mul_over_second, position=1, swap=True),
    ),
    aten.mul.Scalar: _first(aten.mul_.Scalar),
    aten.div.Scalar: _first(aten.div_.Scalar),
    aten.threshold_backward.default: _gradient(aten.threshold_backward.grad_input),
    aten.gelu_backward.default: _gradient(aten.gelu_backward.grad_input),
    aten.silu_backward.default: _gradient(aten.silu_backward.grad_input),
    aten.hardtanh_backward.default: _gradient(aten.hardtanh_backward.grad_input),
    aten.leaky_relu_backward.default: _gradient(aten.leaky_relu_backward.grad_input),
    aten._log_softmax.default: (Overwriter(aten._log_softmax.out, keyword="out"),),
    aten._log_softmax_backward_data.default: (
        Overwriter(aten._log_softmax_backward_data.out, keyword="out"),
    ),
}


def in_place(view: OpView) -> Extension | None:
    """Offer each way of writing the op's result over an argument of the same geometry."""
    alternatives: list[Alternative] = []
    calls: list[Call] = []
    default = view.op.alternatives[0]
    for overwriter in IN_PLACE[view.node.target]:
        target = _overwritable(view, overwriter)
        if target is None:
            continue
        alternatives.append(
            Alternative(
                name=f"{view.op.target}.over_argument_{overwriter.position}",
                reads=default.reads,
                writes=default.writes,
                overwrites=view.values_of(target)[0],
            )
        )
        calls.append(_call(view, overwriter, target))
    return Extension(tuple(alternatives), tuple(calls)) if alternatives else None


def _overwritable(view: OpView, overwriter: Overwriter) -> fx.Node | None:
    """Return the argument if its storage is the step's own, whole, and of the same geometry."""
    call = view.call
    target = call.args[overwriter.position] if len(call.args) > overwriter.position else None
    if not isinstance(target, fx.Node) or (overwriter.swap and call.kwargs):
        return None
    base = base_of(target)
    if base.op != "call_function" or sum(base_of(n) is base for n in call.nodes()) != 1:
        return None
    mine, other = view.node.meta["val"], target.meta["val"]
    same = (
        isinstance(other, torch.Tensor)
        and mine.shape == other.shape
        and mine.stride() == other.stride()
        and mine.dtype == other.dtype
        and storage_bytes(mine) == other.numel() * other.element_size()
    )
    value = view.captured.graph.values[view.values_of(target)[0]]
    written = view.captured.graph.values[view.op.alternatives[0].writes[0]]
    free = value.fate == "none" and value.size_bytes == written.size_bytes
    return target if same and free else None


def _call(view: OpView, overwriter: Overwriter, target: fx.Node) -> Call:
    args, kwargs = view.call.args, dict(view.call.kwargs)
    if overwriter.keyword is not None:
        kwargs[overwriter.keyword] = target
    elif overwriter.swap:
        args = (args[1], args[0], *args[2:])
    return Call(overwriter.function, args, kwargs, view.call.outputs, is_tuple=False)
