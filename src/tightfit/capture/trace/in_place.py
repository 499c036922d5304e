"""Tensors written in place keep their layout in the trace.

The tracer turns an operator that writes in place into the operator that returns a new result, and
some of these lay it out differently. Rows of a transposed tensor that is masked in place come out
one after the other. All that follows would run on another layout than plain PyTorch's, and may
round differently.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tightfit.capture.nodes import draws, is_without_gaps
from tightfit.errors import CaptureError
from tightfit.torch_private import core as private

aten = torch.ops.aten


_PRODUCTS = (aten.addmm.default, aten.addbmm.default, aten.baddbmm.default)


class LayoutsInPlace(private.TorchDispatchMode):
    """Traces a write in place that would change a layout as a result that is copied into place."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        functional = _functional_variant(func)
        if functional is None or not _may_differ_in_layout(args[0]) or draws(func, args, kwargs):
            return func(*args, **kwargs)
        if not _differs_in_layout(functional, args, kwargs):
            return func(*args, **kwargs)
        if functional in _PRODUCTS:
            raise CaptureError(
                f"{func} writes a product into a transposed tensor: a new one would be "
                "added up in another order. Way out: make a new one, or a contiguous tensor"
            )
        return aten.copy_.default(args[0], functional(*args, **kwargs))


@functools.cache
def _functional_variant(func: Any) -> Any:
    """Return the operator that returns the result of an in-place operator, or None."""
    if not isinstance(func, private.OpOverload) or func is aten.copy_.default:
        return None
    name, _, overload = func.name().removeprefix("aten::").partition(".")
    if not name.endswith("_") or torch.Tag.inplace_view in func.tags:
        return None
    return getattr(getattr(aten, name[:-1], None), overload or "default", None)


def _may_differ_in_layout(written: Any) -> bool:
    """Whether a result may have another layout than its target; parts are put in again."""
    is_tensor = isinstance(written, torch.Tensor)
    return is_tensor and not written.is_contiguous() and is_without_gaps(written)


def _differs_in_layout(functional: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a result has another layout than the first argument, as far as that is known."""
    with private.without_modes():
        given, named = private.pytree.tree_map(_shape_of, (args, kwargs))
        try:
            result = functional(*given, **named)
        except (RuntimeError, TypeError, NotImplementedError):  # no kernel for shapes alone
            return False
        pairs = zip(result.shape, result.stride(), given[0].stride(), strict=True)
        return any(own != before for size, own, before in pairs if size > 1)


def _shape_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes = value.shape, value.stride()
        return torch.empty_strided(*sizes, dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymFloat | torch.SymInt | torch.SymBool):
        return 1
    return value
