"""Prices at once: each distinct call runs at most once, and only where its bytes are not plain.

The memory of some kernels is plain (`tightfit.pricing.plain`): of each such operator one call is
timed, and the others are scaled from it by their operations or bytes. Every other call runs once,
for its workspace and its layout, if there is room for it; its time is taken on the way. Costs
learned from steps replace these later (`tightfit.pricing.in_steps`).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import msgspec
import torch
from torch import fx

from tightfit.capture.captured import Call, Captured
from tightfit.capture.nodes import flat_outputs, storage_bytes
from tightfit.capture.stepping.predicted import PredictedOp
from tightfit.costs.measured.call import Footprint, Measurement, measure_once
from tightfit.costs.neighbour import matched, scaled_from, work
from tightfit.graph.ir import Graph, OpId, ValueId
from tightfit.pricing.exactness import compare_alternatives
from tightfit.pricing.fewer_rows import rows_of, shortened
from tightfit.pricing.keys import is_opaque, key_of, name_of
from tightfit.pricing.plain import plain_footprint
from tightfit.pricing.price import Priced, may_need_workspace, priced_by
from tightfit.pricing.records import UNKNOWN, Brief, recorded
from tightfit.progress import SILENT, Progress
from tightfit.torch_private import core as private

_LAUNCH_S = 3e-6  # the least a scaled call costs
_TYPICAL_BYTES = 4 << 20  # moved by the call of an operator that others are scaled from
_LARGE_BYTES = 256 << 20  # read and made by a call that need not run, and takes long
_STRETCH_BYTES = 16 << 20  # moved at least by a call of which a stretch is a part
_BYTES_PER_S = 5e9  # of an operator of which nothing is known
_NUMBERS_BYTES = 256  # numbers as tensors: all that a call works with whose bytes are plain
_ROUNDING = 1.07  # of workspaces that are predicted from fewer rows
_HELD = 4  # times inputs and results of a call: about the bytes of a run of it


@dataclass(frozen=True)
class _DistinctCall:
    call: Call  # how it is run
    kind: str  # equal for calls that differ in sizes only: they are scaled from each other
    work: int  # operations, or bytes moved
    running_bytes: int  # of its inputs and results
    plain: Footprint | None  # its bytes if known without running it
    by_stretches: bool  # whether it runs on stretches of bounded size, which bounds its workspace

    @property
    def must_run(self) -> bool:
        """Whether nothing else tells its workspace."""
        return self.plain is None and not self.by_stretches


def quick_costs(
    captured: Captured,
    progress: Progress,
    *,
    room_bytes: int | None = None,
    neighbour: Graph | None = None,
    postpones: bool = False,
) -> Priced:
    """Return the captured step with costs and workspaces that are known, or found out at once.

    `room_bytes`: the most bytes of inputs and results of a call that runs. One that needs more runs
    on fewer rows of its batch, and takes more in proportion. Where it does not run on fewer, a
    default is priced by other calls of its operator, and another way is left out. Opaque modules
    run in any case. `neighbour`: priced, of the same callable on inputs of another shape: costs are
    scaled from it, and calls that need no workspace there do not run. `postpones`: whether to leave
    alternatives that take long to compare for later: `Captured.with_postponed` has them.
    """
    kept = compare_alternatives(captured, progress, room_bytes=room_bytes, postpones=postpones)
    captured = kept.captured
    likes = matched(captured.graph, neighbour) if neighbour is not None else {}
    as_there = {place for place, like in likes.items() if not may_need_workspace(like)}
    asked = _distinct_calls(captured, as_there, alone=neighbour is None)
    needed = _needed(captured, kept.postponed, asked) if kept.postponed else asked
    chosen = _chosen(needed.values(), room_bytes, alone=neighbour is None)
    known = recorded(captured, [each.call for each in chosen], Brief, _brief, progress)
    large = {key: each for key, each in needed.items() if each.must_run and key not in known}
    if room_bytes is not None:
        known |= _by_rows(captured, large.values(), room_bytes)
    unknown = frozenset(large.keys() - known.keys())
    scaled = _scaled(asked, known)
    of_defaults = (key_of(calls[0]) for calls in captured.calls)
    predicted = frozenset(op for op, key in enumerate(of_defaults) if key in large)
    captured = dataclasses.replace(captured, predicted=predicted)
    if kept.postponed:
        ready = captured.keeping(lambda op, way, call: id(call) not in kept.postponed)
        priced = priced_by(ready, scaled, "measured", unknown)
        every = priced_by(captured, scaled, "measured").captured
        return Priced(dataclasses.replace(priced.captured, with_postponed=every), priced.strides)
    priced = priced_by(captured, scaled, "measured", unknown)
    captured = priced.captured
    if neighbour is not None:
        captured = captured.with_graph(scaled_from(captured.graph, neighbour))
    if kept.on_rows:
        graph = captured.graph
        captured = captured.keeping(lambda op, way, call: id(call) not in kept.on_rows)
        captured = dataclasses.replace(captured, larger_budget_graph=graph)
    return Priced(captured, priced.strides)


def _chosen(
    needed: Iterable[_DistinctCall], room_bytes: int | None, *, alone: bool
) -> list[_DistinctCall]:
    """Return the calls that run: those whose bytes are not plain, and one of each other operator.

    `alone`: no neighbour prices the step; else calls whose bytes are plain do not run.
    """
    fitting = [x for x in needed if room_bytes is None or x.running_bytes <= room_bytes]
    chosen = [distinct for distinct in fitting if distinct.plain is None]
    if alone:
        plain = (distinct for distinct in fitting if distinct.plain is not None)
        chosen += _typical(x for x in plain if x.running_bytes <= _LARGE_BYTES)
    return chosen


def _needed(
    captured: Captured, postponed: frozenset[int], asked: Mapping[str, _DistinctCall]
) -> dict[str, _DistinctCall]:
    """Return the calls that a plan may make before postponed alternatives are compared.

    Ops that were added for alternatives are of no use where only postponed ones read their results.
    """
    plain = set(captured.nodes if captured.plain is None else captured.plain.nodes)
    read: set[ValueId] = set()
    needed: set[str] = set()
    for op, node in zip(reversed(captured.graph.ops), reversed(captured.nodes), strict=True):
        is_extra = node not in plain and not op.changes
        if is_extra and read.isdisjoint(op.alternatives[0].writes):
            continue
        for way, call in zip(op.alternatives, captured.calls[op.id], strict=True):
            if id(call) not in postponed:
                read.update(way.reads)
                needed.add(key_of(call))
    return {key: distinct for key, distinct in asked.items() if key in needed}


def _by_rows(
    captured: Captured, asked: Iterable[_DistinctCall], room_bytes: int
) -> dict[str, Brief]:
    """Return costs of calls without room, from runs of them on fewer rows of the batch."""
    found: dict[str, Brief] = {}
    for distinct in asked:
        nodes = list(distinct.call.nodes())
        whole = rows_of(nodes)
        most = min(whole - 1, whole * room_bytes // (_HELD * max(1, distinct.running_bytes)))
        if is_opaque(distinct.call):
            continue
        for numbers in _numbers_of_rows(most, whole):
            if distinct.running_bytes * max(numbers) > whole * room_bytes:
                continue
            runs = {rows: _on_rows(captured, distinct.call, nodes, rows) for rows in numbers}
            if None not in runs.values():
                found[key_of(distinct.call)] = _grown(runs, whole)  # type: ignore[arg-type]
                break
    return found


def _numbers_of_rows(most: int, whole: int) -> Iterator[tuple[int, ...]]:
    """Yield on how many rows to run a call: on one only at last, as it may take another way."""
    if most > 2:
        yield most, max(2, most // 2)
    yield from ((rows,) for rows in (2, 1) if rows < whole)


def _on_rows(captured: Captured, call: Call, nodes: Sequence[fx.Node], rows: int) -> Brief | None:
    """Return the cost of a call on so many rows; None where it takes no fewer, or has no room."""
    for fewer in shortened(captured, nodes, rows):
        few = fewer.call(call)
        found = recorded(captured, [few], Brief, _brief, SILENT)
        if found:
            return found[key_of(few)]
    return None


def _grown(runs: Mapping[int, Brief], whole: int) -> Brief:
    """Return the cost of a call on all rows: as much more with each as between two runs of it.

    And a little more than that, for a kernel may round up its memory.
    """
    most, few = max(runs), min(runs)
    taken = runs[most].workspace_bytes
    each = taken / most if few == most else (taken - runs[few].workspace_bytes) / (most - few)
    fields = msgspec.structs.asdict(UNKNOWN)
    fields["workspace_bytes"] = max(0, round(taken + each * _ROUNDING * (whole - most)))
    return Brief(cost_s=runs[most].cost_s * whole / most, **fields)


def _brief(*arguments: Any, **keywords: Any) -> Brief:
    return Brief.of(measure_once(*arguments, **keywords))


def _distinct_calls(
    captured: Captured, as_there: set[OpId], *, alone: bool
) -> dict[str, _DistinctCall]:
    """Return the distinct calls of a step by their keys; `alone`: no neighbour prices them."""
    graph = captured.graph
    asked: dict[str, _DistinctCall] = {}
    for op, calls, node in zip(graph.ops, captured.calls, captured.nodes, strict=True):
        plain = UNKNOWN if op.id in as_there else plain_footprint(calls[0], flat_outputs(node))
        for way, call in zip(op.alternatives, calls, strict=True):
            key = key_of(call)
            if key in asked:
                continue
            in_place = way.overwrites is not None and not isinstance(call.function, FunctionType)
            by_stretches = alone and bool(call.stretches)
            own = plain if call is calls[0] or in_place or by_stretches else None
            made = sum(graph.values[v].size_bytes for v in way.writes)
            asked[key] = _DistinctCall(
                call=call,
                kind=_kind(call if own is None or by_stretches else calls[0]),
                by_stretches=by_stretches,
                work=max(1, work(graph, op, way)),
                running_bytes=_read_bytes(call) + made,
                plain=None if is_opaque(call) else own,
            )
    return asked


def _kind(call: Call) -> str:
    """Return the operator with the types of its arguments; a number takes room as a tensor."""
    args, kwargs = fx.map_arg((call.args, call.kwargs), lambda n: n.meta.get("val"))
    leaves = private.pytree.tree_leaves((args, kwargs))
    types = (str(x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__ for x in leaves)
    return f"{name_of(call.function)} {call.stretches} {' '.join(types)}"


def _read_bytes(call: Call) -> int:
    """Return the bytes of the storages of a call's arguments; 0 if it need not run."""
    if isinstance(call.function, PredictedOp):
        return 0
    leaves = [leaf for node in set(call.nodes()) for leaf in flat_outputs(node)]
    return sum(storage_bytes(leaf) for leaf in leaves)


def _typical(asked: Iterable[_DistinctCall]) -> list[_DistinctCall]:
    """Return one call of each operator: the largest that is quickly run, else the smallest."""
    by_kind: dict[str, list[_DistinctCall]] = defaultdict(list)
    for distinct in asked:
        by_kind[distinct.kind].append(distinct)

    def distance(distinct: _DistinctCall) -> tuple[bool, int]:
        return distinct.work > _TYPICAL_BYTES, abs(_TYPICAL_BYTES - distinct.work)

    return [min(alike, key=distance) for alike in by_kind.values()]


def _scaled(
    asked: Mapping[str, _DistinctCall], known: Mapping[str, Brief]
) -> dict[str, Measurement]:
    """Return the cost of every call; a call that did not run is scaled from others like it."""
    # Of each operator: of calls that must run, and of others
    largest: dict[tuple[str, bool], tuple[_DistinctCall, Brief]] = {}
    for key, record in known.items():
        distinct = asked[key]
        kind = distinct.kind, distinct.plain is None
        if kind not in largest or distinct.work > largest[kind][0].work:
            largest[kind] = distinct, record
    found: dict[str, Measurement] = {}
    for key, distinct in asked.items():
        must_run = distinct.plain is None
        alike = largest.get((distinct.kind, must_run)) or largest.get((distinct.kind, not must_run))
        found[key] = known.get(key) or _estimate(distinct, *(alike or (distinct, None)))
    return found


def _estimate(
    distinct: _DistinctCall, like_asked: _DistinctCall, like: Brief | None
) -> Measurement:
    """Return the cost of a call that did not run, from another call of its operator.

    Its time grows with its work, its workspace with its inputs and results. The workspace of a call
    whose bytes are plain, such as a number as a tensor, does not grow.
    """
    footprint = distinct.plain or UNKNOWN
    if like is None:
        cost_s, workspace_bytes = distinct.work / _BYTES_PER_S, footprint.workspace_bytes
    else:
        cost_s = like.cost_s * distinct.work / like_asked.work
        growth = 1.0
        if distinct.plain is None:
            growth = distinct.running_bytes / max(1, like_asked.running_bytes)
        if distinct.by_stretches:
            growth = max(1.0, min(growth, _STRETCH_BYTES / like_asked.work))
        workspace_bytes = int(like.workspace_bytes * growth)
        if distinct.plain is not None:
            workspace_bytes = min(workspace_bytes, _NUMBERS_BYTES)
    fields = msgspec.structs.asdict(footprint) | {"workspace_bytes": workspace_bytes}
    return Measurement(cost_s=max(_LAUNCH_S, cost_s), **fields)
