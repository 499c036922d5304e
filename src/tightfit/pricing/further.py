"""Prices of the ways that a priced step lacks: only these are measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator

import msgspec
from torch import fx

from tightfit.capture.captured import Captured
from tightfit.costs.measured.call import Measurement, measure_call
from tightfit.graph.ir import Alternative, Op, Variant
from tightfit.pricing.exactness import compare_alternatives
from tightfit.pricing.keys import key_of
from tightfit.pricing.price import priced_by, without_room
from tightfit.pricing.records import recorded
from tightfit.progress import Progress


def further_costs(
    wider: Captured, priced: Captured, progress: Progress, *, room_bytes: int | None = None
) -> Captured:
    """Return a step priced as another is, of whose trace it is made with further alternatives.

    Prices of the other are taken over. A further way takes as much longer than the default as
    it does when both run by themselves.

    `wider`: has all alternatives of the other step, and more. `room_bytes`: memory for comparing an
    alternative with its default; alternatives without room to be compared at their own size are
    left out.
    """
    kept = compare_alternatives(_with_sizes_of(priced, wider), progress, room_bytes=room_bytes)
    wider = kept.captured.keeping(lambda op, way, call: id(call) not in kept.on_rows)
    known = dict(zip(_places(priced), priced.graph.ops, strict=True))
    strange = [
        calls[number]
        for place, op, calls in zip(_places(wider), wider.graph.ops, wider.calls, strict=True)
        for number in _to_measure(op, known.get(place))
    ]
    records = recorded(wider, strange, Measurement, measure_call, progress)
    unknown = without_room(strange, records)
    wider = priced_by(wider, records, priced.graph.cost_source, unknown).captured
    ops = tuple(
        _priced_as(op, known.get(place), records.get(key_of(calls[0])))
        for place, op, calls in zip(_places(wider), wider.graph.ops, wider.calls, strict=True)
    )
    return wider.with_graph(msgspec.structs.replace(wider.graph, ops=ops))


def _with_sizes_of(priced: Captured, wider: Captured) -> Captured:
    """Return a step whose traced values are as large as kernels make them."""
    values = list(wider.graph.values)
    number = len(values if wider.plain is None else wider.plain.graph.values)
    for value in priced.graph.values[:number]:
        values[value.id] = msgspec.structs.replace(values[value.id], size_bytes=value.size_bytes)
    return wider.with_graph(msgspec.structs.replace(wider.graph, values=tuple(values)))


def _places(captured: Captured) -> Iterator[Hashable]:
    """Yield keys of ops that hold for all steps of one trace: a node, or a kind and a number."""
    plain = captured if captured.plain is None else captured.plain
    traced: set[fx.Node] = set(plain.nodes)
    seen: Counter[tuple[str, str]] = Counter()
    for op, node in zip(captured.graph.ops, captured.nodes, strict=True):
        kind = (op.target, op.module)
        if node in traced:
            yield node
        else:
            yield (*kind, seen[kind])
            seen[kind] += 1


def _to_measure(op: Op, like: Op | None) -> list[int]:
    """Return the numbers of those ways of an op that its like lacks, and the default."""
    names = set() if like is None else {way.name for way in like.alternatives}
    lacking = [number for number, way in enumerate(op.alternatives) if way.name not in names]
    return [0, *lacking] if lacking else []


def _priced_as(op: Op, like: Op | None, default: Measurement | None) -> Op:
    """Return an op with prices of the like op for its ways, and prices for further ways."""
    if like is None:
        return op
    known = {way.name: way.variants for way in like.alternatives}
    before = min(variant.cost_s for variant in like.alternatives[0].variants)
    scale = before / default.cost_s if default is not None and default.cost_s > 0 else 1.0
    ways = tuple(
        msgspec.structs.replace(way, variants=known.get(way.name) or _scaled(way, scale))
        for way in op.alternatives
    )
    return msgspec.structs.replace(op, alternatives=ways)


def _scaled(way: Alternative, scale: float) -> tuple[Variant, ...]:
    return tuple(msgspec.structs.replace(v, cost_s=v.cost_s * scale) for v in way.variants)
