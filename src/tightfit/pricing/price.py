"""Put measured costs and workspaces on a captured step: each distinct call is measured once."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tightfit.capture.captured import Call, Captured
from tightfit.capture.trace.strides import Strides, TrueStrides, misreported
from tightfit.costs.measured.call import Footprint, Measurement, measure_call, measure_workspace
from tightfit.costs.neighbour import matched, scaled_from
from tightfit.costs.variants import operator_name
from tightfit.graph.ir import Alternative, Graph, Op, ValueId, Variant
from tightfit.pricing.exactness import compare_alternatives, without_inexact
from tightfit.pricing.keys import is_opaque, key_of
from tightfit.pricing.records import UNKNOWN, recorded
from tightfit.progress import Progress
from tightfit.units import rounded_up

_COMPARING_S = 3.0  # in a first call
_CHOOSING = ("conv", "attention", "rnn", "cudnn", "batch_norm")  # kernels chosen by shape


@dataclass(frozen=True)
class Priced:
    """A captured step after each of its calls was run."""

    captured: Captured  # the step with measurements
    strides: TrueStrides  # of results by kernels, where they differ from the trace's


class Prices(msgspec.Struct, frozen=True):
    """Results of pricing a step, without the step: for processes that run the same step."""

    strides: dict[str, tuple[Strides, ...]]  # to trace the step with
    graph: Graph  # priced, without alternatives whose results are laid out differently


def priced_as_kernels_run(
    first: Captured, trace: Callable[[TrueStrides], Captured], price: Callable[[Captured], Priced]
) -> Priced:
    """Price a step, and trace it again until it has all strides as kernels make them.

    `first`: the step, traced without knowing of such. `trace`: traces the step again, given the
    true strides that are known. `price`: `measured_costs` or its like.
    """
    known: dict[str, tuple[Strides, ...]] = {}
    priced = price(first)
    while not priced.strides.keys() <= known.keys():
        known.update(priced.strides)
        priced = price(trace(known))
    return Priced(priced.captured, known)


def prices_of(priced: Priced) -> Prices:
    """Return the data for another process to price the same step."""
    return Prices(dict(priced.strides), priced.captured.graph)


def with_prices(captured: Captured, prices: Prices) -> Captured:
    """Return a step, traced with the strides of some prices, with these prices."""
    kept = [{way.name for way in op.alternatives} for op in prices.graph.ops]
    captured = captured.keeping(lambda op, way, call: way.name in kept[op.id])
    return captured.with_graph(prices.graph)


def measured_costs(captured: Captured, progress: Progress, *, postpones: bool = False) -> Priced:
    """Return the captured step with the cost and workspace of every alternative measured.

    Each distinct call (operator, shapes, strides, dtypes, other arguments) runs a few times on
    synthetic tensors, unless the disk cache knows it. Random generators are left as they were.

    `progress`: shows each call that is measured. `postpones`: whether to compare alternatives for
    three seconds only; `Captured.with_postponed` has those that are left for later.
    """
    kept = compare_alternatives(captured, progress, postpones=postpones, seconds=_COMPARING_S)
    captured = kept.captured
    calls = [call for calls in captured.calls for call in calls]
    known = recorded(captured, calls, Measurement, measure_call, progress)
    unknown = without_room(calls, known)
    known = including_launches(captured, known)
    if not kept.postponed:
        return priced_by(captured, known, "measured", unknown)
    ready = captured.keeping(lambda op, way, call: id(call) not in kept.postponed)
    priced = priced_by(ready, known, "measured", unknown)
    every = priced_by(captured, known, "measured", unknown).captured
    return Priced(dataclasses.replace(priced.captured, with_postponed=every), priced.strides)


def including_launches(
    captured: Captured, known: Mapping[str, Measurement]
) -> Mapping[str, Measurement]:
    """Return the cost of calls: of launches, where a step's launches take longer than its kernels.

    A GPU waits for them then, and recomputation costs as much as its launches.
    """
    usual = [known[key] for calls in captured.calls if (key := key_of(calls[0])) in known]
    if sum(record.launch_s for record in usual) <= sum(record.cost_s for record in usual):
        return known
    return {k: msgspec.structs.replace(r, cost_s=r.launch_s) for k, r in known.items()}


def measured_workspaces(captured: Captured, progress: Progress) -> Priced:
    """Return the captured step with the workspace of every alternative measured, costs kept.

    A model of costs says nothing of workspaces, and a plan that is to run must hold them.
    Parameters are as of `measured_costs`; each distinct call runs twice.
    """
    captured = without_inexact(captured, progress)
    calls = [call for calls in captured.calls for call in calls]
    known = recorded(captured, calls, Footprint, measure_workspace, progress)
    unknown = without_room(calls, known)
    return priced_by(captured, known, captured.graph.cost_source, unknown)


def without_room(calls: Iterable[Call], known: Mapping[str, Footprint]) -> frozenset[str]:
    """Return the keys of calls that a budget has had no room to run by themselves."""
    return frozenset(key_of(call) for call in calls) - known.keys()


def scaled_costs(captured: Captured, neighbour: Graph, progress: Progress) -> Priced:
    """Return the captured step with costs scaled from its costs at another shape of its inputs.

    Workspaces are measured, except where the neighbour's is nothing and the kernel is not chosen
    by shape; ops that the neighbour lacks are measured as `measured_costs` does.

    `neighbour`: priced, of the same callable on inputs of another shape. `progress`: as for
    `measured_costs`.
    """
    captured = without_inexact(captured, progress)
    likes = matched(captured.graph, neighbour)
    strange = [c for op in captured.graph.ops if op.id not in likes for c in captured.calls[op.id]]
    known = recorded(captured, strange, Measurement, measure_call, progress)
    hungry = [
        call
        for op in captured.graph.ops
        if op.id in likes
        for call in captured.calls[op.id]
        if may_need_workspace(likes[op.id]) or is_opaque(call)
    ]
    taken = recorded(captured, hungry, Footprint, measure_workspace, progress)
    known = {**taken, **known}
    unknown = without_room([*strange, *hungry], known)
    priced = priced_by(captured, known, captured.graph.cost_source, unknown)
    scaled = priced.captured.with_graph(scaled_from(priced.captured.graph, neighbour))
    return Priced(scaled, priced.strides)


def may_need_workspace(like: Op) -> bool:
    """Whether an op whose neighbour is known may need a workspace at another shape."""
    taken = max(v.workspace_bytes for a in like.alternatives for v in a.variants)
    return taken > like.random_state_bytes or any(
        part in operator_name(like.target) for part in _CHOOSING
    )


def priced_by(
    captured: Captured, known: Mapping[str, Any], source: str, unknown: frozenset[str] = frozenset()
) -> Priced:
    """Return the captured step with measurements of its calls, and the strides of kernels.

    `known`: by the key of a call; a `Measurement` also tells its cost. Others count as traced.
    `source`: where the costs come from. `unknown`: the keys of calls whose workspace is
    unknown: no plan takes them where there is another way.
    """
    if unknown:
        captured = captured.keeping(lambda op, way, call: key_of(call) not in unknown)
    records = [[known.get(key_of(c), UNKNOWN) for c in calls] for calls in captured.calls]
    strides: dict[str, tuple[Strides, ...]] = {}
    for node, (default, *_) in zip(captured.nodes, records, strict=True):
        strides |= misreported(node, default.output_strides)
    captured = _with_true_sizes(captured, records)
    record_of = {
        id(call): record
        for calls, own in zip(captured.calls, records, strict=True)
        for call, record in zip(calls, own, strict=True)
    }
    captured = captured.keeping(
        lambda op, way, call: _is_made_alike(
            captured, way, (captured.calls[op.id][0], call), record_of
        )
    )
    ops = tuple(
        msgspec.structs.replace(
            op,
            alternatives=tuple(
                _with_record(op, way, record_of[id(call)])
                for way, call in zip(op.alternatives, calls, strict=True)
            ),
        )
        for op, calls in zip(captured.graph.ops, captured.calls, strict=True)
    )
    graph = msgspec.structs.replace(captured.graph, ops=ops, cost_source=source)
    priced = captured.with_graph(graph)
    return Priced(_without_unknown_extras(priced, unknown) if unknown else priced, strides)


def _without_unknown_extras(captured: Captured, unknown: frozenset[str]) -> Captured:
    """Return a step in which no plan takes an op of ours whose first way is not known.

    Such ops only serve alternatives. Their first way stays, as that of any op, and takes all room.
    """
    too_much = sum(value.size_bytes for value in captured.graph.values)
    ops = list(captured.graph.ops)
    for op, (first, *_) in zip(captured.graph.ops, captured.calls, strict=True):
        if isinstance(first.function, types.FunctionType) and key_of(first) in unknown:
            way = op.alternatives[0]
            variant = msgspec.structs.replace(way.variants[0], workspace_bytes=too_much)
            way = msgspec.structs.replace(way, variants=(variant,))
            ops[op.id] = msgspec.structs.replace(op, alternatives=(way, *op.alternatives[1:]))
    return captured.with_graph(msgspec.structs.replace(captured.graph, ops=tuple(ops)))


def _with_true_sizes(captured: Captured, records: Sequence[Sequence[Footprint]]) -> Captured:
    """Return the step with the sizes of the storages that kernels really make.

    A mean may come in the storage of its sum, for example.
    """
    granularity = captured.graph.device.granularity_bytes
    values = list(captured.graph.values)
    for op in captured.graph.ops:
        call, record = captured.calls[op.id][0], records[op.id][0]
        overwritten = op.alternatives[0].overwrites
        sizes = {v: size for v, (_, size) in _made(call, record).items() if size > 0}
        if overwritten is not None:
            sizes[op.alternatives[0].writes[0]] = values[overwritten].size_bytes
        for value, size_bytes in sizes.items():
            rounded = rounded_up(size_bytes, granularity)
            values[value] = msgspec.structs.replace(values[value], size_bytes=rounded)
    graph = msgspec.structs.replace(captured.graph, values=tuple(values))
    return dataclasses.replace(captured, graph=graph)


def _is_made_alike(
    captured: Captured,
    way: Alternative,
    calls: tuple[Call, Call],
    record_of: Mapping[int, Footprint],
) -> bool:
    """Whether the results of an alternative have the strides and sizes of the default's.

    Kernels choose their path by the strides of their inputs: with another path bits may differ.
    `calls` are the default's and its own.
    """
    default, made = (_made(call, record_of[id(call)]) for call in calls)
    if default and not made.items() <= default.items():
        return False
    values = captured.graph.values
    over = way.overwrites
    return over is None or values[over].size_bytes == values[way.writes[0]].size_bytes


def _made(call: Call, record: Footprint) -> dict[ValueId, tuple[Strides, int]]:
    made = zip(call.outputs, record.output_strides, record.output_bytes, strict=False)
    return {value: (strides, size) for value, strides, size in made if value is not None}


def _with_record(op: Op, alternative: Alternative, record: Footprint) -> Alternative:
    cost_s = record.cost_s if isinstance(record, Measurement) else alternative.variants[0].cost_s
    workspace_bytes = record.workspace_bytes
    if alternative.use == "again":
        workspace_bytes += op.random_state_bytes  # the generator's present state is put aside
    variant = Variant(cost_s=cost_s, workspace_bytes=workspace_bytes)
    return msgspec.structs.replace(alternative, variants=(variant,))
