"""Unit costs: every op costs one (Griewank and Walther, 2000; Chen et al., 2016)."""

from __future__ import annotations

from tightfit.costs.variants import price
from tightfit.graph.ir import Graph


def with_unit_costs(graph: Graph) -> Graph:
    """Return the graph with a cost of 1 for every alternative of every op."""
    return price(graph, lambda op, alternative: 1.0, "unit")
