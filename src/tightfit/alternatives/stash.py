"""Forward values kept for the backward in fewer bytes: as halves, or without their zeros.

Delayed precision reduction and sparse storage of Gist (Jain et al., 2018; MONeT, appendix E). The
forward computes with the whole value; the backward makes one again from the kept bytes, once for
all ops that read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tightfit.alternatives.base import Extension, Extra, Implementation, OpView, is_dense
from tightfit.alternatives.bits import bit_bytes, flat, pack, stretches, unpack
from tightfit.capture.nodes import base_of, is_view

aten = torch.ops.aten

_LARGEST = torch.finfo(torch.float16).max
_MOST_FILLED = 0.6  # of the elements: behind a ReLU about half are not zero
_HEADER_BYTES = 8
_AS_HALVES = -1


def halved(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a single-precision tensor in half precision; larger numbers become its largest."""
    made = torch.empty_strided(x.shape, strides, dtype=torch.float16, device=x.device)
    _write_halves(flat(x, strides), flat(made, strides))
    return made


def widened(half: torch.Tensor) -> torch.Tensor:
    return half.to(torch.float32)


def compressed_bytes(elements: int) -> int:
    """Return the bytes of so many elements without their zeros."""
    return _HEADER_BYTES + 4 * (_most(elements) + 1) + bit_bytes(elements)


def compressed(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a single-precision tensor without its zeros.

    A bit for each element says whether it is stored, which takes less than a column for each stored
    one. For any numbers, the work needs the same memory.

    `strides`: of `x`; its elements are taken in the order of memory. Returns uint8 Tensor,
    [compressed_bytes]: the values and the bits. Of a tensor with fewer zeros than there is room
    for: its elements as halves.
    """
    elements = flat(x, strides)
    packed = torch.empty(compressed_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    header, values, bits = _parts(packed, x.numel())
    unused, filled = values.numel() - 1, 0
    for part, its_bits in stretches(elements):
        stored = elements[part].view(torch.int32) != 0  # a negative zero is stored too
        places = stored.cumsum(0).add_(filled - 1)
        filled = int(places[-1]) + 1
        if filled > unused:
            header.fill_(_AS_HALVES)
            _write_halves(elements, _halves(packed, x.numel()))
            return packed
        values.scatter_(0, torch.where(stored, places, unused), elements[part])
        pack(stored, bits[its_bits])
    header.fill_(filled)
    return packed


def restored(packed: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Return the tensor that `compressed` was given.

    `packed`: from `compressed`.
    """
    made = torch.empty_strided(shape, strides, dtype=torch.float32, device=packed.device)
    elements = flat(made, strides)
    header, values, bits = _parts(packed, made.numel())
    if header == _AS_HALVES:
        elements.copy_(_halves(packed, made.numel()))
        return made
    filled = 0
    for part, its_bits in stretches(elements):
        stored = unpack(bits[its_bits], part.stop - part.start).view(torch.bool)
        places = stored.cumsum(0).add_(filled - 1)
        filled = int(places[-1]) + 1
        torch.gather(values, 0, places.clamp_(min=0), out=elements[part])
        elements[part].view(torch.int32).mul_(stored)
    return made


def _write_halves(elements: torch.Tensor, out: torch.Tensor) -> None:
    for part, _ in stretches(elements):
        out[part].copy_(elements[part].clamp(-_LARGEST, _LARGEST))


def _most(elements: int) -> int:
    return math.ceil(_MOST_FILLED * elements)


def _parts(packed: torch.Tensor, elements: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return how many are stored, room for one more than these, and the bits, as views."""
    sizes = [_HEADER_BYTES, 4 * (_most(elements) + 1), bit_bytes(elements)]
    header, values, bits = packed.split(sizes)
    return header.view(torch.int64), values.view(torch.float32), bits


def _halves(packed: torch.Tensor, elements: int) -> torch.Tensor:
    return packed[_HEADER_BYTES:][: 2 * elements].view(torch.float16)


def kept_in_fewer_bytes(view: OpView) -> Extension | None:
    """Offer backward ops an op's result that is made again of fewer bytes."""
    node = (
        view.output_of(view.node, 0) if isinstance(view.node.meta.get("val"), tuple) else view.node
    )
    if node is None or not view.is_forward(view.node) or not _may_be_kept(view, node):
        return None
    readers = view.read_backward(node)
    if not readers:
        return None
    value = node.meta["val"]
    strides, first = tuple(value.stride()), readers[0]
    room = value.new_empty_strided(value.shape, strides, dtype=torch.float16)
    whole = value.new_empty_strided(value.shape, strides)
    half = view.extra("stash.half", halved, node, strides, made=room)
    again = view.extra("stash.widened", widened, half.node, before=first, made=whole)
    pairs = [("half", half, again)]
    if view.node.target is aten.relu.default:
        room = value.new_empty(compressed_bytes(value.numel()), dtype=torch.uint8)
        sparse = view.extra("stash.sparse", compressed, node, strides, made=room)
        args = (sparse.node, tuple(value.shape), strides)
        again = view.extra("stash.restored", restored, *args, before=first, made=whole)
        pairs.append(("sparse", sparse, again))
    return Extension(
        (),
        extras=tuple(extra for _, *both in pairs for extra in both),
        elsewhere=tuple(
            (reader, _reading(view, reader, node, again, kind))
            for kind, _, again in pairs
            for reader in readers
        ),
    )


def _may_be_kept(view: OpView, node: fx.Node) -> bool:
    value, known = node.meta["val"], view.value_of(node)
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.float32
        and value.dim() > 1
        and is_dense(value)
        and known is not None
        and known.fate == "none"
    )


def _reading(
    view: OpView, reader: fx.Node, node: fx.Node, again: Extra, kind: str
) -> Implementation:
    """Return the implementation of a backward op that reads the value made again."""
    call = view.call_of(reader)
    args, kwargs = fx.map_arg((call.args, call.kwargs), _replacer(node, again.node))
    name = f"from_{kind}.{node.name}"
    return Implementation(
        name, call.function, args, kwargs, exactness="lossy", rests_on=(view.node,)
    )


def _replacer(node: fx.Node, other: fx.Node) -> Callable[[fx.Node], fx.Node]:
    """Return a function that replaces a tensor by another, or by the same view of it."""

    def put(argument: fx.Node) -> fx.Node:
        if argument is node:
            return other
        if base_of(argument) is not node or not is_view(argument):
            return argument
        args, kwargs = fx.map_arg((argument.args, argument.kwargs), put)
        made = other.graph.call_function(argument.target, args, kwargs)  # type: ignore[arg-type]
        made.meta = dict(argument.meta)
        return made

    return put
