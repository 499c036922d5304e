"""The forward of a step by itself: what runs whichever gradients are asked for afterwards."""

from __future__ import annotations

import msgspec

from tightfit.graph.ir import Graph, Value


def forward_of(graph: Graph) -> Graph:
    """Return a step without the ops of its backward; every plan of the step has room for it.

    Values keep their ids; those of the backward take no memory. Alternatives are chosen op by op,
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
