"""Fake kernels and results of our own, where torch's are wrong or missing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from tightfit.torch_private.patches import replaced

aten = torch.ops.aten


def _fake_grouped_mm(
    a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Return outputs of the CPU kernel: torch's own fake kernel takes half precision only."""
    if a.device.type != "cpu":
        return NotImplemented
    shape = (*a.shape[:-1], b.shape[-1])
    if a.dim() == 2 and b.dim() == 2:  # groups along the dimension that is summed over
        shape = (offs.shape[0], *shape)
    elif a.dim() == 3 and b.dim() == 2:  # groups along the columns
        shape = shape[1:]
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


def _fake_gru_cell(_gates: Any, _hidden_gates: Any, hidden: Any, *_: Any) -> Any:
    """Return outputs of the fused kernel of a GPU, the last for its backward."""
    batch, size = hidden.shape
    return hidden.new_empty(batch, size), hidden.new_empty(batch, 5 * size)


def _fake_gru_cell_backward(gradient: Any, workspace: Any, has_bias: bool) -> Any:
    """Return gradients of both kinds of gates, of the hidden state and of the biases."""
    batch, size = gradient.shape
    gates = [workspace.new_empty(batch, 3 * size) for _ in range(2)]
    biases = [workspace.new_empty(3 * size) if has_bias else None for _ in range(2)]
    return *gates, gradient.new_empty(batch, size), *biases


def _as_torch_calls(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that is called with the fake mode and the operator first."""
    return lambda _mode, _func, *args, **kwargs: kernel(*args, **kwargs)


_FAKE_KERNELS = {
    getattr(aten, name).default: _as_torch_calls(kernel)
    for name, kernel in {
        "_grouped_mm": _fake_grouped_mm,
        "_thnn_fused_gru_cell": _fake_gru_cell,
        "_thnn_fused_gru_cell_backward": _fake_gru_cell_backward,
    }.items()
    if hasattr(aten, name)
}


_NORMS = frozenset(
    {
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
        aten.native_group_norm.default,
    }
)


def _with_float_statistics(func: Any, args: Any, _kwargs: Any, result: Any) -> Any:
    """Let a CPU's norms of half precision with float weights keep float statistics."""
    if func not in _NORMS:
        return result
    x, *given = (t for t in args if isinstance(t, torch.Tensor))
    is_half = x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)
    if not is_half or not any(t.dtype is torch.float32 for t in given):
        return result
    output, *statistics = result
    return output, *(s.new_empty(s.shape, dtype=torch.float32) for s in statistics)


_BY_NUMBERS = frozenset(getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div"))


def _as_iterated(func: Any, args: Any, result: Any) -> Any:
    """Return the result of a tensor and a number with the strides that kernels give it.

    Of a contiguous tensor PyTorch's own fake kernel makes another stride for a dimension of one
    element. The kernel on the meta device has the true one for a tensor of no dimensions.
    """
    x, *numbers = args
    is_by_number = isinstance(x, torch.Tensor) and all(type(n) in (int, float) for n in numbers)
    if not is_by_number or 1 not in result.shape or x.stride() == result.stride():
        return result
    with _disable_current_modes():
        meta = torch.empty_strided(x.shape, x.stride(), device="meta")
        strides = func(meta, torch.empty((), device="meta")).stride()
    return result.new_empty_strided(result.shape, strides)


_CPU_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


def _as_computed(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Return results of the types and strides that kernels return.

    A CPU's attention in double precision keeps its sums so, which PyTorch 2.11 does not tell. Its
    backward of dropout is a product: PyTorch's own fake kernel has the strides of a GPU's.
    """
    if func is aten.native_dropout_backward.default and args[0].device.type == "cpu":
        gradient, mask, *_ = args
        return gradient * mask
    if func in _BY_NUMBERS:
        return _as_iterated(func, args, result)
    if func is _CPU_ATTENTION and result[0].dtype is torch.float64:
        output, sums = result
        return output, sums.to(torch.float64)
    return _with_float_statistics(func, args, kwargs, result)


@contextlib.contextmanager
def corrected_fake_kernels() -> Iterator[None]:
    """While tracing, use our fake kernels where torch's refuse inputs that the CPU accepts."""
    kernels = fake_impls.op_implementations_dict
    before = {op: kernels.get(op) for op in _FAKE_KERNELS}
    kernels.update(_FAKE_KERNELS)
    try:
        with corrected_fake_results(_as_computed):
            yield
    finally:
        for op, kernel in before.items():
            if kernel is None:
                del kernels[op]
            else:
                kernels[op] = kernel


@contextlib.contextmanager
def corrected_fake_results(correct: Callable[[Any, Any, Any, Any], Any]) -> Iterator[None]:
    """While tracing, pass (operator, args, kwargs, result) of fake kernels through a function.

    It returns the result to use, made of fake tensors: their mode is not active.
    """
    plain = FakeTensorMode.dispatch

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = plain(self, func, types, args, kwargs or {})
        return correct(func, args, kwargs or {}, result)

    with replaced(FakeTensorMode, dispatch=dispatch):
        yield
