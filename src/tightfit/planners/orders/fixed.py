"""Which ops an order may not exchange: their effects would come in another order."""

from __future__ import annotations

from tightfit.graph.ir import Graph, Op


def keeps_its_place(graph: Graph, op: Op) -> bool:
    """Return whether an op keeps its traced order with the others of its kind in its segment.

    Ops that draw random numbers do, and pinned ops, which may have effects. Pinned ops that make a
    gradient or change a constant need not: nothing else has the same effect. On a CUDA device
    graphs do not say which ops draw: there the whole forward pass keeps its order.
    """
    if graph.device.kind == "cuda" and graph.segments[op.segment].phase == "forward":
        return True
    made = (graph.values[v] for way in op.alternatives for v in way.writes)
    gives = any(value.fate == "handed_over" for value in made)
    return op.random_state_bytes > 0 or (op.pinned is not None and not gives and not op.changes)
