"""Claims of the alternatives of a step: each is compared with the default."""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tightfit.capture.captured import Call, Captured
from tightfit.capture.nodes import flat_outputs
from tightfit.capture.stepping.predicted import PredictedOp
from tightfit.graph.ir import Alternative, Exactness, OpId
from tightfit.pricing.keys import key_of, name_of
from tightfit.torch_private import core as private

aten = torch.ops.aten

_ELEMENTWISE = (  # as PyTorch's own tag says of others
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.elu_backward.default,
)


@dataclass(frozen=True)
class Claim:
    """The claim of an alternative: its exactness."""

    # default, call: both sides of the comparison
    default: Call
    call: Call
    exactness: Exactness  # the claim
    # key, kind: equal for comparisons that come out alike, and for comparisons that differ in sizes
    # only
    key: str
    kind: str
    is_by_element: bool  # whether it treats each element by itself
    made_bytes: int  # bytes of its results

    @property
    def holds_for_more_rows(self) -> bool:
        """Whether it comes out alike at any size, or with any number of rows."""
        return self.kind != self.key


def claims_of(captured: Captured) -> dict[tuple[OpId, int], Claim]:
    """Return the claims of the alternatives of a step, by their ops and numbers."""
    return {
        (op.id, number): _claim(captured, calls[0], calls[number], way)
        for op, calls in zip(captured.graph.ops, captured.calls, strict=True)
        for number, way in enumerate(op.alternatives)
        if number and not _is_the_same(calls[0], calls[number])
        if not isinstance(calls[number].function, PredictedOp)  # tried by its contributor
    }


def _is_the_same(default: Call, call: Call) -> bool:
    """Whether an alternative runs just the default's function, only at another time."""
    return call.function is default.function and call.args == default.args


def _claim(captured: Captured, default: Call, call: Call, way: Alternative) -> Claim:
    key = "\n".join((key_of(default), key_of(call), _code(call.function)))
    return Claim(
        default,
        call,
        way.exactness,
        key,
        _kind(default, call, key, way.name),
        _is_by_element(default, call),
        made_bytes=sum(captured.graph.values[v].size_bytes for v in way.writes),
    )


@functools.cache
def _code(function: Callable[..., Any]) -> str:
    """Return a hash of the file that defines a function of ours: if it changes, compare again."""
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    ours = isinstance(function, types.FunctionType) and file is not None
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if ours and file else ""


def _kind(default: Call, call: Call, key: str, name: str) -> str:
    """Return a text that is equal for comparisons of elementwise ops at any size."""
    if call.stretches:
        return " ".join((name, call.stretches, *_layouts(default, call)))
    functions = name_of(default.function), name_of(call.function)
    if call.by_rows:
        return " ".join((name, *functions, *_layouts(default, call), *_by_rows(default, call)))
    if not _is_by_element(default, call):
        return key
    return " ".join((name, *functions, *_layouts(default, call)))


def _is_by_element(default: Call, call: Call) -> bool:
    if call.stretches:
        return True
    if call.by_rows or not isinstance(call.function, private.OpOverload):
        return False
    tags = getattr(default.function, "tags", ())
    return torch.Tag.pointwise in tags or default.function in _ELEMENTWISE


def _layouts(*calls: Call) -> list[str]:
    return [
        _layout(x) if isinstance(x, torch.Tensor) else type(x).__name__ for x in _leaves(*calls)
    ]


def _by_rows(*calls: Call) -> list[str]:
    """Return the shape of one row of each tensor, and values other than tensors."""
    rows = [str(tuple(x.shape[1:])) for x in _leaves(*calls) if isinstance(x, torch.Tensor)]
    return rows + [str(fx.map_arg((call.args, call.kwargs), lambda node: None)) for call in calls]


def _leaves(*calls: Call) -> list[Any]:
    return [x for call in calls for n in call.nodes() for x in flat_outputs(n)]


def _layout(tensor: torch.Tensor) -> str:
    dimensions = [d for d, size in enumerate(tensor.shape) if size > 1]
    order = sorted(dimensions, key=tensor.stride)
    return f"{tensor.dtype} {tensor.dim()} {order == sorted(order, reverse=True)}"
