"""Put measured costs and workspaces on a captured step: each distinct call is measured once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import torch
from torch import fx

from tightfit.capture import _torch as private
from tightfit.capture.answers import Question
from tightfit.capture.eager_calls import BlockBackward, BlockForward
from tightfit.capture.lift import Call, Captured
from tightfit.capture.synthetic import synthetic_arguments
from tightfit.costs.cache import Cache
from tightfit.costs.measured import (
    Measurement,
    PeakFunction,
    Workspace,
    call_key,
    environment_of,
    measure_call,
    measure_workspace,
)
from tightfit.costs.neighbour import matched, scaled_from
from tightfit.costs.pricing import operator_name
from tightfit.graph.ir import Graph, Op, Variant
from tightfit.progress import Progress

__all__ = ["measured_costs", "measured_workspaces", "scaled_costs"]

_CHOOSING = ("conv", "attention", "rnn", "cudnn", "batch_norm")  # kernels chosen by shape
_NOTHING = Workspace(workspace_bytes=0)


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
    calls = [call for calls in captured.calls for call in calls]
    known = _measured(captured, calls, Measurement, measure_call, measure_peak, progress)
    return _priced(captured, known, "measured")


def measured_workspaces(
    captured: Captured, measure_peak: PeakFunction, progress: Progress
) -> Captured:
    """Return the captured step with the workspace of every alternative measured, costs kept.

    A model of costs says nothing of workspaces, and a plan that is to run must hold them.
    Parameters are those of `measured_costs`; each distinct call runs twice.
    """
    calls = [call for calls in captured.calls for call in calls]
    known = _measured(captured, calls, Workspace, measure_workspace, measure_peak, progress)
    return _priced(captured, known, captured.graph.cost_source)


def scaled_costs(
    captured: Captured, neighbour: Graph, measure_peak: PeakFunction, progress: Progress
) -> Captured:
    """Return the captured step with costs scaled from those of another shape of its inputs.

    Workspaces are measured, except where the neighbour's is nothing and the kernel is not chosen
    by shape; ops that the neighbour lacks are measured as `measured_costs` does.

    Parameters
    ----------
    captured : Captured
        The step.
    neighbour : Graph
        Priced, of the same callable on inputs of another shape.
    measure_peak, progress
        As for `measured_costs`.
    """
    likes = matched(captured.graph, neighbour)
    strange = [c for op in captured.graph.ops if op.id not in likes for c in captured.calls[op.id]]
    known = _measured(captured, strange, Measurement, measure_call, measure_peak, progress)
    hungry = [
        call
        for op in captured.graph.ops
        if op.id in likes
        for call in captured.calls[op.id]
        if _may_need_workspace(likes[op.id]) or _is_block(call)
    ]
    taken = _measured(captured, hungry, Workspace, measure_workspace, measure_peak, progress)
    priced = _priced(captured, {**taken, **known}, captured.graph.cost_source)
    return priced.with_graph(scaled_from(priced.graph, neighbour))


def _may_need_workspace(like: Op) -> bool:
    """Whether an op whose neighbour is known may need a workspace at another shape."""
    taken = max(v.workspace_bytes for a in like.alternatives for v in a.variants)
    return taken > like.random_state_bytes or any(
        part in operator_name(like.target) for part in _CHOOSING
    )


def _measured(
    captured: Captured,
    calls: Iterable[Call],
    kind: Any,
    measure: Callable[..., Any],
    measure_peak: PeakFunction,
    progress: Progress,
) -> dict[str, Any]:
    """Return a record of a kind for the key of every call, from the disk cache or measured."""
    device = _device(captured)
    cache = Cache(environment_of(device))
    wanted = {_key(captured, call): call for call in calls}
    known = {key: cache.get(f"{kind.__name__}\n{key}", kind) for key in wanted}
    missing = [(key, call) for key, call in wanted.items() if known[key] is None]
    if not missing:
        return known
    progress.start("measuring operators", len(missing))
    try:
        for done, (key, call) in enumerate(missing):
            progress.update(done, _name(call.function))
            if _is_block(call):
                known[key] = _of_block(call.function, kind, measure_peak)
                continue
            args, kwargs = synthetic_arguments(captured.joint.module, call)
            is_question = isinstance(call.function, Question)
            function = call.function.unchecked if is_question else call.function
            with private.without_autocast():
                known[key] = measure(
                    function, args, kwargs, device=device, measure_peak=measure_peak
                )
            cache.put(f"{kind.__name__}\n{key}", known[key])
    finally:
        cache.save()
        progress.stop()
    return known


def _is_block(call: Call) -> bool:
    return isinstance(call.function, BlockForward | BlockBackward)


def _of_block(
    function: BlockForward | BlockBackward, kind: Any, measure_peak: PeakFunction
) -> Measurement | Workspace:
    """Return what an opaque module takes; it is known in this process only."""
    measured = function.measure(measure_peak)
    return measured if kind is Measurement else Workspace(workspace_bytes=measured.workspace_bytes)


def _device(captured: Captured) -> torch.device:
    for node in captured.joint.placeholders:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.device
    return torch.device("cpu")


def _priced(captured: Captured, known: Mapping[str, Any], source: str) -> Captured:
    ops = []
    for op in captured.graph.ops:
        alternatives = []
        for alternative, call in zip(op.alternatives, captured.calls[op.id], strict=True):
            record = known.get(_key(captured, call), _NOTHING)
            cost_s = getattr(record, "cost_s", None)
            variant = Variant(
                cost_s=alternative.variants[0].cost_s if cost_s is None else cost_s,
                workspace_bytes=record.workspace_bytes + op.random_state_bytes,
            )
            alternatives.append(msgspec.structs.replace(alternative, variants=(variant,)))
        ops.append(msgspec.structs.replace(op, alternatives=tuple(alternatives)))
    graph = msgspec.structs.replace(captured.graph, ops=tuple(ops), cost_source=source)
    return captured.with_graph(graph)


def _name(function: Any) -> str:
    if isinstance(function, torch._ops.OpOverload):
        return function.name()
    if isinstance(function, BlockForward | BlockBackward):
        return f"opaque module {function.block.name}"
    if isinstance(function, Question):
        return f"asked {function}"
    return f"{function.__module__}.{function.__qualname__}"


def _key(captured: Captured, call: Call) -> str:
    if _is_block(call):
        return f"this process: {call.function!r}"

    def fake(node: fx.Node) -> Any:
        return node.meta.get("val", node.target)

    args, kwargs = fx.map_arg((call.args, call.kwargs), fake)
    return call_key(_name(call.function), args, kwargs)
