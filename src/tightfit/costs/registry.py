"""The table of modelled costs by name: adding a machine is an entry in `machines.py`."""

from __future__ import annotations

from tightfit.costs.machines import MACHINES
from tightfit.costs.roofline import on_machine, with_roofline_costs
from tightfit.costs.variants import price
from tightfit.errors import BadInput
from tightfit.graph.ir import Alternative, Graph, Op

_FLOPS_PER_SECOND = 1e12
_ELEMENT_BYTES = 4

COST_SOURCES: dict[str, str] = {
    "unit": "every op costs 1",
    "flops": "floating-point operations",
    **{key: f"roofline of the {machine.name}" for key, machine in MACHINES.items()},
    "cpu": "roofline of this machine's CPU, its peaks measured once",
}

MEASURED = "measured"
"""Costs of a captured step, measured where it runs: no model of its graph."""


def refuse_unknown_costs(source: str) -> None:
    """Raise `BadInput` for costs of a step that nothing gives; list the known ones."""
    if source != MEASURED and source not in COST_SOURCES:
        known = ", ".join((MEASURED, *COST_SOURCES))
        raise BadInput(f"no costs are called {source!r} (known: {known})")


def with_costs(graph: Graph, source: str) -> Graph:
    """Return the graph with modelled costs.

    ``"unit"`` and ``"flops"`` change only costs. The name of a GPU also rounds sizes as its
    allocator does and sets the graph's device; the graph's `cost_source` then ends in
    ``"(estimate)"``. ``"cpu"`` needs torch, to measure the CPU's peaks. Measured costs need the
    captured step, not only its graph: see `tightfit.costs.measured.call`.

    Raises `BadInput` for an unknown name; lists the known ones.
    """
    if source == "unit":  # Griewank and Walther (2000), Chen et al. (2016)
        return price(graph, lambda op, alternative: 1.0, source)
    if source == "flops":
        return _in_flops(graph)
    if source == "cpu":
        from tightfit.costs.measured.this_cpu import this_cpu

        return with_roofline_costs(graph, this_cpu(), "roofline:cpu")
    if source in MACHINES:
        return on_machine(graph, source, MACHINES[source])
    raise BadInput(f"no modelled costs are called {source!r} (known: {', '.join(COST_SOURCES)})")


def _in_flops(graph: Graph) -> Graph:
    """Return the graph with costs in FLOP, as seconds of a machine that does 1e12 in a second.

    Checkmate's search for the largest batch has such costs. Every op costs at least one operation
    for each 4 bytes that it writes, and at least one in all.
    """

    def cost(op: Op, alternative: Alternative) -> float:
        elements = graph.bytes_of(alternative.writes) // _ELEMENT_BYTES
        return max(op.flops_of(alternative), elements, 1) / _FLOPS_PER_SECOND

    return price(graph, cost, "flops")
