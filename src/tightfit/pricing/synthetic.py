"""Arguments to measure a call with: of the shapes of the trace, with values that fit each other.

Where a mask decides how large something is, it is true just as often as in the trace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tightfit.capture.captured import Call
from tightfit.capture.nodes import is_getitem
from tightfit.capture.operators.masks import places, put_gradient, rows_of
from tightfit.costs.measured.call import kind_of, materialise
from tightfit.torch_private import core as private

aten = torch.ops.aten

_PUTS = (aten.index_put.default, aten._unsafe_index_put.default)
_PIVOTED = (aten.linalg_lu_solve.default, aten.lu_unpack.default)
_DIVIDES = (
    aten.remainder.Tensor,
    aten.remainder.Scalar_Tensor,
    aten.fmod.Tensor,
    aten.floor_divide.default,
    aten.div.Tensor_mode,
)
_MASKS = (torch.bool, torch.uint8)
_SEEDS = (2, 3)
_KEEP_SEEDS_ON_CPU = {
    aten._scaled_dot_product_efficient_attention.default: _SEEDS,
    aten._efficient_attention_forward.default: _SEEDS,
}
"""Which outputs are on the CPU wherever the inputs are; on fake tensors they are where those are.

The backward reads them there: given a pointer of a GPU it would end the process.
"""


class KnownResults:
    """Real results of ops of a step, as far as any have run: here none."""

    def given(self, call: Call) -> Mapping[fx.Node, Any]:
        """Return results of ops that a call must get as they are."""
        return {}

    def kind(self, node: fx.Node) -> str | None:
        """Return the type and device of a result, where the trace has others."""
        return None


_NOTHING = KnownResults()


def synthetic_arguments(
    module: fx.GraphModule, call: Call, made: KnownResults = _NOTHING
) -> tuple[Any, Any]:
    """Return real arguments for a traced call: tensors of the shapes and strides of the trace.

    `module`: the traced step, which holds the constants. `made`: results of ops that have run; the
    trace may differ.
    """
    given = made.given(call)

    def real(node: fx.Node) -> Any:
        if node in given:
            return given[node]
        if node.op == "get_attr":
            return getattr(module, str(node.target))
        kind = "cpu" if _is_on_cpu(node) else made.kind(node)

        def materialised(fake: torch.Tensor) -> torch.Tensor:
            return _materialised(fake, kind)

        return private.pytree.tree_map_only(torch.Tensor, materialised, node.meta["val"])

    args, kwargs = fx.map_arg((call.args, call.kwargs), real)
    if call.function in _PUTS:
        _fit_put(args[0], args[1], args[2].shape)
    elif call.function is put_gradient:
        _fit_put(*args)
    elif call.function is places:
        _make_true(args[0], args[0].shape, args[1])
    elif call.function is aten._embedding_bag_backward.default:
        args[4].fill_(1)  # no bag is empty
    elif call.function in _DIVIDES and isinstance(args[1], torch.Tensor):
        args[1].fill_(1)  # integers cannot be divided by nothing
    elif call.function in _PIVOTED:
        args[1].copy_(torch.arange(1, args[1].shape[-1] + 1))
    elif call.function is aten.masked_scatter.default:
        _make_true(args[1], args[0].shape, args[2].numel())
    elif call.function is aten.masked_scatter_backward.default:
        _make_true(args[1], args[0].shape, math.prod(args[2]))
    return args, kwargs


def _is_on_cpu(node: fx.Node) -> bool:
    if not is_getitem(node):
        return False
    made, index = node.args
    assert isinstance(made, fx.Node)
    return index in _KEEP_SEEDS_ON_CPU.get(made.target, ())  # pyright: ignore


def _materialised(fake: torch.Tensor, kind: str | None) -> torch.Tensor:
    """Return a real tensor for a fake tensor, of another kind if that is known."""
    *dtype, place = (kind or kind_of(fake)).split()
    device = fake.device if place == fake.device.type else torch.device(place)
    real: torch.dtype = getattr(torch, dtype[0]) if dtype else fake.dtype
    whole = fake.untyped_storage().nbytes() // fake.itemsize * real.itemsize
    return materialise(fake.shape, fake.stride(), real, device, storage_bytes=whole)


def _make_true(mask: torch.Tensor, shape: Sequence[int], count: int) -> None:
    """Let a mask, broadcast to a shape, be true as often as given."""
    for dimension, stride in enumerate(mask.stride()):
        if stride == 0 and mask.shape[dimension] > 1:
            mask = mask.narrow(dimension, 0, 1)
    if not mask.numel():
        return
    times = max(1, math.prod(shape) // mask.numel())
    true = torch.arange(mask.numel(), device=mask.device) < count // times
    mask.copy_(true.view(mask.shape))


def _fit_put(x: torch.Tensor, indices: Sequence[Any], shape: Sequence[int]) -> None:
    """Let masks select as many places as other indices do, or as there are rows of values.

    All places where values of this shape are the same for each.
    """
    masks = [i for i in indices if i is not None and i.dtype in _MASKS]
    if not masks:
        return
    count = rows_of(x.dim(), indices, shape)
    for mask in masks:
        _make_true(mask, mask.shape, mask.numel() if count is None else count)
