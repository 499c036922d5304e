"""Put measured costs and workspaces on a captured step: each distinct call is measured once."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import fx

from tightfit.capture import _torch as private
from tightfit.capture.eager_calls import BlockBackward, BlockForward
from tightfit.capture.lift import Call, Captured
from tightfit.costs.cache import Cache
from tightfit.costs.measured import (
    Measurement,
    PeakFunction,
    call_key,
    environment_of,
    materialise,
    measure_call,
)
from tightfit.graph.ir import Variant
from tightfit.progress import Progress

__all__ = ["measured_costs"]


def measured_costs(captured: Captured, measure_peak: PeakFunction, progress: Progress) -> Captured:
    """Return the captured step with the cost and workspace of every alternative measured.

    Each distinct call (operator, shapes, strides, dtypes, other arguments) runs a few times on
    synthetic tensors, unless the disk cache knows it. Random generators are left as they were.

    Parameters
    ----------
    captured : Captured
        The step.
    measure_peak : callable
        Meters one call; see `tightfit.allocator.measure_peak`.
    progress : Progress
        Told of each call that is measured.
    """
    device = _device(captured)
    cache = Cache(environment_of(device))
    wanted = {_key(captured, call): call for calls in captured.calls for call in calls}
    known = {key: cache.get(key, Measurement) for key in wanted}
    missing = [(key, call) for key, call in wanted.items() if known[key] is None]
    if missing:
        progress.start("measuring operators", len(missing))
        try:
            for done, (key, call) in enumerate(missing):
                progress.update(done, _name(call.function))
                known[key] = _measure(captured, call, device, measure_peak)
                if not isinstance(call.function, BlockForward | BlockBackward):
                    cache.put(key, known[key])  # type: ignore[arg-type]
        finally:
            cache.save()
            progress.stop()
    return _priced(captured, {k: m for k, m in known.items() if m is not None})


def _device(captured: Captured) -> torch.device:
    for node in captured.joint.placeholders:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.device
    return torch.device("cpu")


def _priced(captured: Captured, known: dict[str, Measurement]) -> Captured:
    ops = []
    for op in captured.graph.ops:
        alternatives = []
        for alternative, call in zip(op.alternatives, captured.calls[op.id], strict=True):
            measurement = known[_key(captured, call)]
            variant = Variant(
                cost_s=measurement.cost_s,
                workspace_bytes=measurement.workspace_bytes + op.random_state_bytes,
            )
            alternatives.append(msgspec.structs.replace(alternative, variants=(variant,)))
        ops.append(msgspec.structs.replace(op, alternatives=tuple(alternatives)))
    graph = msgspec.structs.replace(captured.graph, ops=tuple(ops), cost_source="measured")
    return Captured(graph, captured.joint, captured.calls, captured.nodes, captured.value_of)


def _measure(
    captured: Captured, call: Call, device: torch.device, measure_peak: PeakFunction
) -> Measurement:
    if isinstance(call.function, BlockForward | BlockBackward):
        return call.function.measure(measure_peak)

    def real(node: fx.Node) -> Any:
        if node.op == "get_attr":
            return getattr(captured.joint.module, str(node.target))
        return private.pytree.tree_map_only(torch.Tensor, _materialised, node.meta["val"])

    args, kwargs = fx.map_arg((call.args, call.kwargs), real)
    with private.without_autocast():
        return measure_call(call.function, args, kwargs, device=device, measure_peak=measure_peak)


def _materialised(fake: torch.Tensor) -> torch.Tensor:
    return materialise(fake.shape, fake.stride(), fake.dtype, fake.device)


def _name(function: Any) -> str:
    if isinstance(function, torch._ops.OpOverload):
        return function.name()
    if isinstance(function, BlockForward | BlockBackward):
        return f"opaque module {function.block.name}"
    return f"{function.__module__}.{function.__qualname__}"


def _key(captured: Captured, call: Call) -> str:
    if isinstance(call.function, BlockForward | BlockBackward):
        return f"this process: {call.function!r}"

    def fake(node: fx.Node) -> Any:
        return node.meta["val"]

    args, kwargs = fx.map_arg((call.args, call.kwargs), fake)
    return call_key(_name(call.function), args, kwargs)
