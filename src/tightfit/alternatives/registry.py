"""The table of operator alternatives: one file for each operator family, one line here.

An entry is a function from an op of a captured step to further ways of computing it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from tightfit.alternatives.base import Extension, OpView
from tightfit.alternatives.batch_norm import batch_norm_again, update_again
from tightfit.alternatives.cross_entropy import BY_ROWS, fused_cross_entropy_gradient
from tightfit.alternatives.draw_again import draw_again
from tightfit.alternatives.in_place import IN_PLACE, in_place
from tightfit.alternatives.tied_embedding import add_embedding_gradient_, folded_embedding_gradient
from tightfit.capture.captured import Captured
from tightfit.graph.ir import Op
from tightfit.graph.validate import validate_graph

__all__ = ["CONTRIBUTORS", "compilable", "with_alternatives"]

aten = torch.ops.aten

Contributor = Callable[[OpView], Extension | None]

CONTRIBUTORS: dict[Any, tuple[Contributor, ...]] = {
    aten._native_batch_norm_legit_functional.default: (batch_norm_again,),
    aten._batch_norm_with_update_functional.default: (update_again,),
    aten._log_softmax_backward_data.default: (fused_cross_entropy_gradient,),
    aten.add_.Tensor: (folded_embedding_gradient,),
}
for _target in IN_PLACE:
    CONTRIBUTORS[_target] = (*CONTRIBUTORS.get(_target, ()), in_place)


_UNCOMPILED: tuple[Callable[..., Any], ...] = (*BY_ROWS, add_embedding_gradient_)
"""Loops over rows, which a compiler would unroll and cannot fuse, or whose shapes data decide."""


def compilable(captured: Captured) -> Captured:
    """Return a step with those of its alternatives that are of use to a compiler."""
    kept = [
        [index for index, call in enumerate(calls) if call.function not in _UNCOMPILED]
        for calls in captured.calls
    ]
    ops = tuple(
        msgspec.structs.replace(op, alternatives=tuple(op.alternatives[i] for i in indices))
        for op, indices in zip(captured.graph.ops, kept, strict=True)
    )
    calls = tuple(
        tuple(own[i] for i in indices) for own, indices in zip(captured.calls, kept, strict=True)
    )
    graph = validate_graph(msgspec.structs.replace(captured.graph, ops=ops))
    return dataclasses.replace(captured, graph=graph, calls=calls)


def with_alternatives(captured: Captured) -> Captured:
    """Return the captured step with every alternative the registry knows for its ops."""
    ops = list(captured.graph.ops)
    calls = list(captured.calls)
    number = {node: op for op, node in enumerate(captured.nodes)}
    for op in captured.graph.ops:
        for contributor in (*CONTRIBUTORS.get(captured.nodes[op.id].target, ()), draw_again):
            extension = contributor(OpView(captured, op))
            if extension is None:
                continue
            ops[op.id] = _extended(ops[op.id], extension)
            calls[op.id] = (*calls[op.id], *extension.calls)
            for node in extension.optional:
                other = number[node]
                ops[other] = msgspec.structs.replace(ops[other], required=False)
    graph = msgspec.structs.replace(captured.graph, ops=tuple(ops))
    return dataclasses.replace(captured, graph=validate_graph(graph), calls=tuple(calls))


def _extended(op: Op, extension: Extension) -> Op:
    first = op.alternatives[0]
    if extension.default_use == "first":
        first = msgspec.structs.replace(first, use="first")
    return msgspec.structs.replace(
        op,
        alternatives=(first, *op.alternatives[1:], *extension.alternatives),
        pinned=None if extension.unpins else op.pinned,
    )
