"""Costs in floating-point operations, as in Checkmate's search for the largest batch."""

from __future__ import annotations

from tightfit.costs.variants import price
from tightfit.graph.ir import Alternative, Graph, Op

FLOPS_PER_SECOND = 1e12
_ELEMENT_BYTES = 4


def with_flops_costs(graph: Graph) -> Graph:
    """Return the graph with costs in FLOP, as seconds of a machine that does 1e12 in a second.

    Every op costs at least one operation for each 4 bytes that it writes, and at least one in all.
    """

    def cost(op: Op, alternative: Alternative) -> float:
        elements = graph.bytes_of(alternative.writes) // _ELEMENT_BYTES
        return max(op.flops_of(alternative), elements, 1) / FLOPS_PER_SECOND

    return price(graph, cost, "flops")
