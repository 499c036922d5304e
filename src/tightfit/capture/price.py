"""Put measured costs and workspaces on a captured step: each distinct call is measured once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import fx

from tightfit.capture import _torch as private
from tightfit.capture.lift import Call, Captured
from tightfit.costs.cache import CostCache
from tightfit.costs.measured import Measurement, materialise, measure_call
from tightfit.graph.ir import Variant
from tightfit.progress import Progress

__all__ = ["call_key", "measured_costs"]


def measured_costs(captured: Captured, progress: Progress) -> Captured:
    """Return the captured step with the cost and workspace of every alternative measured.

    Each distinct call (operator, shapes, strides, dtypes, other arguments) runs a few times on
    synthetic tensors, unless the disk cache knows it. Random generators are left as they were.
    """
    cache = CostCache.open(captured.graph.device)
    wanted = {call_key(captured, call): call for calls in captured.calls for call in calls}
    missing = [(key, call) for key, call in wanted.items() if cache.get(key) is None]
    if missing:
        _measure_all(captured, missing, cache, progress)
    ops = []
    for op in captured.graph.ops:
        alternatives = []
        for alternative, call in zip(op.alternatives, captured.calls[op.id], strict=True):
            measurement = cache.get(call_key(captured, call))
            assert measurement is not None
            variant = Variant(
                cost_s=measurement.cost_s,
                workspace_bytes=measurement.workspace_bytes + op.random_state_bytes,
            )
            alternatives.append(msgspec.structs.replace(alternative, variants=(variant,)))
        ops.append(msgspec.structs.replace(op, alternatives=tuple(alternatives)))
    graph = msgspec.structs.replace(captured.graph, ops=tuple(ops), cost_source="measured")
    return Captured(graph, captured.joint, captured.calls, captured.nodes, captured.value_of)


def _measure_all(
    captured: Captured, missing: list[tuple[str, Call]], cache: CostCache, progress: Progress
) -> None:
    state = torch.get_rng_state()
    progress.start("measuring operators", len(missing))
    try:
        for done, (key, call) in enumerate(missing):
            progress.update(done, _function_name(call.function))
            cache.put(key, _measure(captured, call))
    finally:
        cache.save()
        progress.stop()
        torch.set_rng_state(state)


def _measure(captured: Captured, call: Call) -> Measurement:
    def real(node: fx.Node) -> Any:
        if node.op == "get_attr":
            return getattr(captured.joint.module, str(node.target))
        return private.pytree.tree_map_only(torch.Tensor, materialise, node.meta["val"])

    args, kwargs = fx.map_arg((call.args, call.kwargs), real)
    with torch.no_grad(), private.without_autocast():
        return measure_call(call.function, args, kwargs)


def call_key(captured: Captured, call: Call) -> str:
    """Return what two calls share exactly if they cost the same."""
    return f"{_function_name(call.function)}({', '.join(_describe(captured, call))})"


def _function_name(function: Any) -> str:
    if isinstance(function, torch._ops.OpOverload):
        return function.name()
    return f"{function.__module__}.{function.__qualname__}"


def _describe(captured: Captured, call: Call) -> Iterator[str]:
    leaves = private.pytree.tree_leaves(
        (call.args, call.kwargs), is_leaf=lambda x: isinstance(x, fx.Node)
    )
    for leaf in leaves:
        value = leaf
        if isinstance(leaf, fx.Node):
            value = leaf.meta["val"]
        if isinstance(value, torch.Tensor):
            shape, strides = tuple(value.shape), tuple(value.stride())
            yield f"{str(value.dtype).removeprefix('torch.')}{shape}{strides}"
        elif isinstance(value, float) and not math.isfinite(value):
            yield str(value)
        else:
            yield repr(value)
