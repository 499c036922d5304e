"""The orders of first computations, other than the traced one, in which plans are looked for."""

from __future__ import annotations

from tightfit.graph.ir import Graph, OpId
from tightfit.planners.orders.frees_early import frees_early
from tightfit.planners.orders.least_peak import LeastPeak

MOST_ORDERED = 10_000  # ops of graphs for which it is tried whether another order fits
MOST_SEARCHED = 3000  # ops of graphs for which plans are searched in other orders


def other_orders(graph: Graph, least: LeastPeak | None) -> dict[tuple[OpId, ...], str]:
    """Return the names of the other orders that plans of a graph may take.

    `least`: the order that needs the least memory with nothing recomputed, if it was looked for.
    """
    others = {} if least is None else {least.ops: "least memory"}
    if len(graph.ops) <= MOST_SEARCHED:
        others[frees_early(graph)] = "frees early"
    others.pop(tuple(range(len(graph.ops))), None)
    return others
