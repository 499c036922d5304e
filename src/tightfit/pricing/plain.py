"""The bytes of a call, as far as they are known without running it.

Elementwise kernels, and on a CPU products of matrices and softmaxes of rows, take no workspace and
lay their results out as traced. Others choose how they compute by their inputs: they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tightfit.capture.captured import Call
from tightfit.capture.nodes import flat_outputs, storage_bytes
from tightfit.costs.measured.call import Footprint
from tightfit.torch_private import core as private

aten = torch.ops.aten
_PRODUCTS = {aten.mm.default: (0, 1), aten.addmm.default: (1, 2)}  # which arguments are matrices
_SOFTMAXES = {  # which argument is the dimension; those before it are tensors
    aten._softmax.default: 1,
    aten._log_softmax.default: 1,
    aten._softmax_backward_data.default: 2,
    aten._log_softmax_backward_data.default: 2,
}
_EXACT = (torch.float32, torch.float64)  # other types are packed, or converted


def plain_footprint(call: Call, outputs: Sequence[Any]) -> Footprint | None:
    """Return the footprint of a call; None if it has to run for it."""
    if len(outputs) != 1 or not isinstance(outputs[0], torch.Tensor):
        return None
    made = outputs[0]
    if storage_bytes(made) != made.numel() * made.itemsize:
        return None
    known = _is_elementwise(call, made) or _is_product(call, made) or _is_softmax(call, made)
    if not known:
        return None
    return Footprint(
        workspace_bytes=0,
        output_bytes=(storage_bytes(made),),
        output_strides=(tuple(made.stride()),),
        aliases=(-1,),
        none_outputs=(),
    )


def _is_elementwise(call: Call, made: torch.Tensor) -> bool:
    """Whether a kernel treats each element by itself, and has nothing to convert or to turn.

    Its result is dense and laid out as an argument of its shape and type. Every other tensor of
    that shape is laid out alike, and of the same type, so that nothing is converted on the way.
    """
    function = call.function
    if not isinstance(function, private.OpOverload):
        return False
    if torch.Tag.pointwise not in function.tags or function._schema.is_mutable:
        return False
    read = [x for n in call.nodes() for x in flat_outputs(n) if isinstance(x, torch.Tensor)]
    alike = [x for x in read if x.shape == made.shape]
    if not alike or any(x.stride() != made.stride() for x in alike):
        return False
    return all(_is_like(x, made) for x in read)


def _is_product(call: Call, made: torch.Tensor) -> bool:
    """Whether a kernel multiplies two matrices without a copy, rows or columns without gaps."""
    places = _PRODUCTS.get(call.function)
    if places is None or made.device.type != "cpu" or made.dtype not in _EXACT:
        return False
    matrices = [flat_outputs(call.args[place])[0] for place in places]
    read = [x for n in call.nodes() for x in flat_outputs(n)]
    return (
        made.stride() == (made.shape[1], 1)
        and all(_is_like(x, made) for x in read)
        and all(x.stride() in ((x.shape[1], 1), (1, x.shape[0])) for x in matrices)
    )


def _is_softmax(call: Call, made: torch.Tensor) -> bool:
    """Whether a kernel treats each row by itself, rows lying one after the other."""
    place = _SOFTMAXES.get(call.function)
    if place is None or made.device.type != "cpu" or made.dtype not in _EXACT:
        return False
    read = [x for n in call.nodes() for x in flat_outputs(n)]
    new = torch.empty(made.shape, device="meta")  # its strides are those of single rows, too
    return call.args[place] in (-1, made.dim() - 1) and all(
        _is_like(x, made) and x.stride() == new.stride() for x in (*read, made)
    )


def _is_like(read: Any, made: torch.Tensor) -> bool:
    is_tensor = isinstance(read, torch.Tensor)
    return is_tensor and read.dtype == made.dtype and read.device == made.device
