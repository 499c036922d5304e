"""What every step runs and holds, independent of its caller after the forward."""

from __future__ import annotations

import msgspec

from tightfit.graph.ir import Graph, Value


def forward_of(graph: Graph) -> Graph:
    """Return a step without the ops of its backward; every plan of the step has room for it.

    Values keep their ids; values of the backward take no memory. Alternatives are chosen op by op,
    also where they are linked: a plan of the forward never needs more for that.
    """
    entered = next((s.id for s in graph.segments if s.phase == "backward"), len(graph.segments))
    ops = tuple(op for op in graph.ops if op.segment < entered)
    made = {v for op in ops for alternative in op.alternatives for v in alternative.writes}

    def kept(value: Value) -> Value:
        if value.is_constant or value.id in made:
            return value
        return Value(id=value.id, name=value.name, size_bytes=0)

    return msgspec.structs.replace(
        graph,
        values=tuple(map(kept, graph.values)),
        ops=ops,
        segments=graph.segments[:entered],
        choices=(),
    )


def outputs_freed(graph: Graph) -> Graph:
    """Return a step whose caller frees its outputs as soon as it may; numbers are left as they are.

    Every plan of the step has room for it: what the backward reads is kept all the same.
    """

    def freed(value: Value) -> Value:
        is_held = value.fate == "returned" and not value.is_constant
        if not is_held or value.size_bytes <= graph.device.granularity_bytes:
            return value
        return msgspec.structs.replace(value, fate="none")

    values = tuple(map(freed, graph.values))
    return graph if values == graph.values else msgspec.structs.replace(graph, values=values)
