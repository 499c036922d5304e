"""The table of operator alternatives: one file for each operator family, one line here.

An entry is a function from an op of a captured step to further ways of computing it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from tightfit.alternatives.base import Extension, OpView
from tightfit.alternatives.batch_norm import batch_norm_again
from tightfit.capture.lift import Captured
from tightfit.graph.validate import validate_graph

__all__ = ["CONTRIBUTORS", "with_alternatives"]

aten = torch.ops.aten

CONTRIBUTORS: dict[Any, Callable[[OpView], Extension | None]] = {
    aten._native_batch_norm_legit_functional.default: batch_norm_again,
}


def with_alternatives(captured: Captured) -> Captured:
    """Return the captured step with every alternative the registry knows for its ops."""
    ops = list(captured.graph.ops)
    calls = list(captured.calls)
    for op in captured.graph.ops:
        contributor = CONTRIBUTORS.get(captured.nodes[op.id].target)
        extension = contributor(OpView(captured, op)) if contributor is not None else None
        if extension is None:
            continue
        first = msgspec.structs.replace(op.alternatives[0], use=extension.default_use)
        ops[op.id] = msgspec.structs.replace(
            op,
            alternatives=(first, *extension.alternatives),
            pinned=None if extension.unpins else op.pinned,
        )
        calls[op.id] = (*calls[op.id], *extension.calls)
    graph = msgspec.structs.replace(captured.graph, ops=tuple(ops))
    return Captured(
        graph=validate_graph(graph),
        joint=captured.joint,
        calls=tuple(calls),
        nodes=captured.nodes,
        value_of=captured.value_of,
    )
