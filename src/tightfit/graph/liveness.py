"""Producers, readers and live bytes of values when a step recomputes nothing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import msgspec

from tightfit.errors import BadInput
from tightfit.graph.ir import Alternative, Gradients, Graph, Op, OpId, SegmentId, ValueId


class Lifetime(msgspec.Struct, frozen=True):
    """When a value is alive if nothing is recomputed."""

    value: ValueId
    # The op that makes it; for a tangent the first op computed after its segment is entered
    first: OpId
    last: OpId  # the last op during which it is alive; ``len(graph.ops)`` if it is alive to the end


def producers(graph: Graph) -> dict[ValueId, OpId]:
    """Return the op that makes each value; constants and tangents have none."""
    return {
        value: op.id
        for op in graph.ops
        for alternative in op.alternatives
        for value in alternative.writes
    }


def readers(graph: Graph) -> tuple[tuple[OpId, ...], ...]:
    """Return, per value, the ops of which at least one alternative reads it, in order."""
    found: list[list[OpId]] = [[] for _ in graph.values]
    for op in graph.ops:
        for value in sorted({v for a in op.alternatives for v in a.reads}):
            found[value].append(op.id)
    return tuple(tuple(ops) for ops in found)


def computed_ops(graph: Graph, chosen: Mapping[OpId, int] | None = None) -> tuple[Op, ...]:
    """Return the ops a step computes if it recomputes nothing.

    `chosen`: the alternative of each op; None: the defaults.
    """
    needed: set[ValueId] = set()
    computed: list[Op] = []
    for op in reversed(graph.ops):
        way = op.alternatives[0 if chosen is None else chosen[op.id]]
        if op.required or needed.intersection(way.writes):
            needed.update(way.reads)
            computed.append(op)
    computed.reverse()
    return tuple(computed)


def tangents(graph: Graph) -> dict[SegmentId, list[ValueId]]:
    """Return the values that user code hands in, by the segment at whose entry they appear."""
    found: dict[SegmentId, list[ValueId]] = {segment.id: [] for segment in graph.segments}
    for value in graph.values:
        if value.role == "tangent" and value.segment is not None:
            found[value.segment].append(value.id)
    return found


def lifetimes(graph: Graph, *, gradients: Gradients = "fresh") -> tuple[Lifetime, ...]:
    """Return the lifetimes of a step that recomputes nothing, one per value that is not constant.

    `gradients`: finished gradients live to the end (``"fresh"``) or to their last use
    (``"accumulated"``).
    """
    ops = computed_ops(graph)
    first: dict[ValueId, OpId] = {}
    last: dict[ValueId, OpId] = {}
    for segment, appearing in tangents(graph).items():
        start = next((op.id for op in ops if op.segment >= segment), len(graph.ops))
        first |= dict.fromkeys(appearing, start)
        last |= dict.fromkeys(appearing, start)
    last_of_segment: dict[int, OpId] = {}
    for op in ops:
        last_of_segment[op.segment] = op.id
        for value in op.alternatives[0].writes:
            first[value] = last[value] = op.id
        for value in op.alternatives[0].reads:
            last[value] = op.id
    for value, op_id in first.items():
        if graph.values[value].stays_to_end(gradients):
            last[value] = len(graph.ops)
        elif graph.values[value].fate == "written_back":
            last[value] = last_of_segment[graph.ops[op_id].segment]
    return tuple(Lifetime(value, first[value], last[value]) for value in sorted(first))


def eager_peak_bytes(graph: Graph, *, gradients: Gradients = "fresh") -> int:
    """Return the peak in bytes, constants included, of a step that recomputes nothing.

    Ops run in the graph's order with default alternatives and their cheapest variants, and each
    value is freed right after its last use.
    """
    begins: dict[OpId, int] = defaultdict(int)
    ends: dict[OpId, int] = defaultdict(int)
    entering = {segment: graph.bytes_of(values) for segment, values in tangents(graph).items()}
    for life in lifetimes(graph, gradients=gradients):
        value = graph.values[life.value]
        if value.segment is None:
            begins[life.first] += value.size_bytes
        ends[life.last] += value.size_bytes
    live = peak = graph.constant_bytes
    entered = 0
    for op in computed_ops(graph):
        for segment in graph.segments[entered : op.segment + 1]:
            peak = max(peak, live + segment.outside_bytes)
            live += entering[segment.id]
        entered = op.segment + 1
        live += begins[op.id]
        peak = max(peak, live + extra_bytes(graph, op.alternatives[0]))
        live -= ends[op.id]
    for segment in graph.segments[entered:]:
        peak = max(peak, live + segment.outside_bytes)
        live += entering[segment.id]
    return max(peak, live)


def extra_bytes(graph: Graph, alternative: Alternative) -> int:
    """Return the workspace of the cheapest variant, less the storage that is taken over."""
    workspace = alternative.variants[alternative.cheapest].workspace_bytes
    return workspace - graph.taken_over_bytes(alternative)


def refuse_ratio(ratio: float) -> None:
    """Raise `BadInput` if a ratio is not a positive finite number."""
    if not (math.isfinite(ratio) and ratio > 0):
        raise BadInput(f"the budget ratio must be a positive number such as 0.5, got {ratio!r}")


def budget_of_ratio(graph: Graph, ratio: float, *, gradients: Gradients = "fresh") -> int:
    """Return the budget in bytes that is a share of the activation peak with nothing recomputed.

    `ratio`: the budget is ``constants + ratio * (peak - constants)``. Raises `BadInput` if the
    ratio is not a positive finite number.
    """
    refuse_ratio(ratio)
    constants = graph.constant_bytes
    return constants + int(ratio * (eager_peak_bytes(graph, gradients=gradients) - constants))
