"""Operators that may write their result over an argument that is not read any more.

Which argument is free to be overwritten depends on the plan; the planner, the verifier and the
lowered program share one rule: equal size, last reader, not kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tightfit.alternatives.base import Extension, Implementation, OpView
from tightfit.capture.captured import Call

aten = torch.ops.aten


@dataclass(frozen=True)
class Overwriter:
    """How an operator runs over one of its arguments."""

    function: Callable[..., Any]  # the in-place or ``out=`` form
    position: int = 0  # the argument that is overwritten
    # The ``out=`` keyword; None: the function writes over its first argument
    keyword: str | None = None
    swap: bool = False  # the operator is commutative and the overwritten argument must come first
    # The operator treats each row by itself, if it does not run along the first dimension
    by_rows: bool = False


def _first(function: Callable[..., Any]) -> tuple[Overwriter, ...]:
    return (Overwriter(function),)


def _gradient(function: Callable[..., Any]) -> tuple[Overwriter, ...]:
    return (Overwriter(function, keyword="grad_input"),)


def add_over_second(second: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Return first + second, written over the second unless the sum would be laid out differently.

    Kernels may choose another layout than the trace saw (of images of one pixel, say). The layout
    of a sum, which the kernels after it depend on, is that of its first full argument.
    """
    return second.add_(first) if _decides_layout(second, first) else first + second


def mul_over_second(second: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Return first * second as `add_over_second` does the sum."""
    return second.mul_(first) if _decides_layout(second, first) else first * second


def select_scatter_over(
    whole: torch.Tensor, part: torch.Tensor, dim: int, index: int
) -> torch.Tensor:
    """Return a tensor with one slice replaced, which is written into the tensor itself."""
    whole.select(dim, index).copy_(part)
    return whole


def slice_scatter_over(
    whole: torch.Tensor,
    part: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> torch.Tensor:
    """Return a tensor with a range replaced, which is written into the tensor itself."""
    aten.slice.Tensor(whole, dim, start, end, step).copy_(part)
    return whole


def diagonal_scatter_over(
    whole: torch.Tensor, part: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    """Return a tensor with a diagonal replaced, which is written into the tensor itself."""
    whole.diagonal(offset, dim1, dim2).copy_(part)
    return whole


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
    # writes of a model into parts of its tensors, as traced into a graph that writes nothing
    aten.select_scatter.default: _first(select_scatter_over),
    aten.slice_scatter.default: _first(slice_scatter_over),
    aten.diagonal_scatter.default: _first(diagonal_scatter_over),
    aten.copy.default: _first(aten.copy_.default),
    aten.index_fill.int_Scalar: _first(aten.index_fill_.int_Scalar),
    aten.index_put.default: _first(aten.index_put_.default),
    aten.index_add.default: _first(aten.index_add_.default),
    aten.index_copy.default: _first(aten.index_copy_.default),
    aten.scatter.src: _first(aten.scatter_.src),
    aten.scatter.value: _first(aten.scatter_.value),
    aten.scatter_add.default: _first(aten.scatter_add_.default),
    aten.masked_fill.Scalar: _first(aten.masked_fill_.Scalar),
    aten.threshold_backward.default: _gradient(aten.threshold_backward.grad_input),
    aten.gelu_backward.default: _gradient(aten.gelu_backward.grad_input),
    aten.silu_backward.default: _gradient(aten.silu_backward.grad_input),
    aten.hardtanh_backward.default: _gradient(aten.hardtanh_backward.grad_input),
    aten.leaky_relu_backward.default: _gradient(aten.leaky_relu_backward.grad_input),
    aten.elu_backward.default: _gradient(aten.elu_backward.grad_input),
    aten._log_softmax.default: (Overwriter(aten._log_softmax.out, keyword="out", by_rows=True),),
    aten._log_softmax_backward_data.default: (
        Overwriter(aten._log_softmax_backward_data.out, keyword="out", by_rows=True),
    ),
}


def in_place(view: OpView) -> Extension | None:
    """Offer to write the op's result over an argument of the same geometry.

    What another contributor offers, by the operator itself with other arguments, may run so too.
    """
    call = view.call
    if _is_sized_by_a_mask(call):
        return None
    default = Implementation(view.op.target, call.function, call.args, call.kwargs)
    found: list[Implementation] = []
    for offer in (default, *(w for w in view.implementations if w.function is call.function)):
        for overwriter in IN_PLACE[view.node.target]:
            target = _overwritable(view, offer, overwriter)
            if target is not None:
                found.append(_over(offer, overwriter, target))
    return Extension(tuple(found)) if found else None


def _is_sized_by_a_mask(call: Call) -> bool:
    """Whether the value put depends on a mask's contents: drawn masks cannot compare it."""
    if call.function is not aten.index_put.default:
        return False
    return any(i is not None and i.meta["val"].dtype == torch.bool for i in call.args[1])


def _overwritable(view: OpView, offer: Implementation, overwriter: Overwriter) -> fx.Node | None:
    """Return the argument if its storage is the step's own, whole, and of the same geometry."""
    target = offer.args[overwriter.position] if len(offer.args) > overwriter.position else None
    if overwriter.swap and offer.kwargs:
        return None
    return target if view.fits_over(target, offer) else None


def _over(offer: Implementation, overwriter: Overwriter, target: fx.Node) -> Implementation:
    args, kwargs = offer.args, dict(offer.kwargs)
    if overwriter.keyword is not None:
        kwargs[overwriter.keyword] = target
    elif overwriter.swap:
        args = (args[1], args[0], *args[2:])
    return dataclasses.replace(
        offer,
        name=f"{offer.name}.over_argument_{overwriter.position}",
        function=overwriter.function,
        args=args,
        kwargs=kwargs,
        overwrites=target,
        by_rows=overwriter.by_rows and _dimension(offer, target) > 0,
    )


def _dimension(offer: Implementation, target: fx.Node) -> int:
    """Return along which dimension a softmax or its backward runs: its first number."""
    given = next(argument for argument in offer.args if isinstance(argument, int))
    return given % max(1, target.meta["val"].dim())
