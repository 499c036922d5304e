"""The bytes that a call of a step holds under a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.graph.ir import Graph
from tightfit.plan.plan import Plan
from tightfit.plan.simulate import simulate


@dataclass(frozen=True, eq=False)
class Holding:
    """The bytes that a call holds under a plan, in addition to constants."""

    plan: Plan | None  # None: an estimate of a plan that is still to be made
    saved_bytes: int  # from the end of its forward to the begin of its backward, outputs left out
    # output_bytes, tangent_bytes: its outputs and their gradients, which others hold too
    output_bytes: int
    tangent_bytes: int
    forward_bytes: int  # peak of its forward
    rise_bytes: int  # peak of its backward above bytes held when that begins
    # cost_s, baseline_cost_s: its cost, and that with nothing recomputed
    cost_s: float
    baseline_cost_s: float

    @property
    def boundary_bytes(self) -> int:
        """Its outputs and their gradients."""
        return self.output_bytes + self.tangent_bytes

    @property
    def staying_bytes(self) -> int:
        """The bytes that stay when its forward has ended."""
        return self.saved_bytes + self.output_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes, if others hold its outputs until its backward has ended."""
        return max(self.forward_bytes, self.rise_bytes + self.saved_bytes + self.boundary_bytes)

    @property
    def needed_bytes(self) -> int:
        """The most bytes, if others free its outputs before its backward."""
        return max(self.forward_bytes, self.rise_bytes + self.saved_bytes + self.tangent_bytes)


def holding_of(graph: Graph, plan: Plan) -> Holding:
    """Return the bytes of a call under a plan."""
    simulation = simulate(graph, plan)
    crossing, constant = simulation.crossing_index, graph.constant_bytes
    outputs, tangents = graph.returned_bytes, graph.tangent_bytes
    begin = simulation.after_bytes[crossing]
    return Holding(
        plan=plan,
        saved_bytes=max(0, begin - constant - outputs - tangents),
        output_bytes=outputs,
        tangent_bytes=tangents,
        forward_bytes=max(simulation.during_bytes[:crossing], default=constant) - constant,
        rise_bytes=max(simulation.during_bytes[crossing:]) - begin,
        cost_s=simulation.cost_s,
        baseline_cost_s=simulation.baseline_cost_s,
    )


def forward_peak_bytes(graph: Graph, plan: Plan) -> int:
    """Return the most that the forward of a plan holds, constants included."""
    return graph.constant_bytes + holding_of(graph, plan).forward_bytes


def overhead_of(holdings: Sequence[Holding]) -> float:
    """Return the extra cost of calls over nothing recomputed, a fraction."""
    least_s = sum(holding.baseline_cost_s for holding in holdings)
    return sum(holding.cost_s for holding in holdings) / least_s - 1 if least_s > 0 else 0.0
