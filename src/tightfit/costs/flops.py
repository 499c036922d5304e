"""Costs in floating-point operations, as in Checkmate's search for the largest batch."""

from __future__ import annotations

from tightfit.costs.variants import price
from tightfit.graph.ir import Graph

FLOPS_PER_SECOND = 1e12
_ELEMENT_BYTES = 4


def with_flops_costs(graph: Graph) -> Graph:
    """Return the graph with costs in FLOP, as seconds of a machine that does 1e12 in a second.

    Ops without counted operations, and those that count fewer, cost one operation for every
    4 bytes they write, and at least one.
    """

    def cost(op_flops: int, written_bytes: int) -> float:
        return max(op_flops, written_bytes // _ELEMENT_BYTES, 1) / FLOPS_PER_SECOND

    return price(
        graph,
        lambda op, alternative: cost(
            op.flops_of(alternative), sum(graph.values[v].size_bytes for v in alternative.writes)
        ),
        "flops",
    )
