"""MONeT's program put together, and the schedules its solutions mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tightfit.graph.ir import ValueId
from tightfit.plan.plan import Compute
from tightfit.planners.papers.monet.constraints import FAMILIES
from tightfit.planners.papers.monet.implementations import Implementations
from tightfit.planners.papers.monet.variables import LocalBound, Variables
from tightfit.planners.papers.stages.scale import grains_of
from tightfit.planners.papers.stages.staged import Implementation, Staged
from tightfit.planners.solvers import LinearProgram, ProgramBuilder, settle_equations, within_reach
from tightfit.planners.solvers.program import Floats


@dataclass(frozen=True)
class MonetProgram:
    """The program with its columns by name."""

    variables: Variables
    program: LinearProgram

    def computes(self, values: Floats) -> list[Compute]:
        """Return the computes of an integral solution in order (algorithms 1 and 2)."""
        variables = self.variables
        forward = range(variables.forward)
        computes = [self._way(values, 0, node, again=False).compute for node in forward]
        for stage in range(1, variables.backward + 1):
            for node in forward:
                column = variables.recomputed.get((stage, node))
                if column is not None and values[column] > 0.5:
                    computes.append(self._way(values, stage, node, again=True).compute)
            way = self._way(values, stage, variables.node_of(stage), again=False)
            computes.append(way.compute)
        return computes

    def settled(self, values: Floats) -> Floats:
        """Return the solution with r and delta of these values, less values not read.

        s stores a value from where it is made to where that instance is read last.
        """
        variables = self.variables
        settled = np.zeros(self.program.columns)
        alive: set[ValueId] = set()
        for stage in range(variables.backward, 0, -1):
            node = variables.node_of(stage)
            self._choose(settled, values, stage, node, again=False)
            alive.update(variables.inputs(self._way(values, stage, node, again=False)))
            for node in range(variables.forward - 1, -1, -1):
                column = variables.recomputed.get((stage, node))
                if column is None or values[column] < 0.5:
                    continue
                way = self._way(values, stage, node, again=True)
                made = {v for v in way.writes if variables.problem.values[v].recoverable}
                if not made.isdisjoint(alive):
                    alive = (alive - made).union(variables.inputs(way))
                    settled[column] = 1.0
                    self._choose(settled, values, stage, node, again=True)
            for value in alive:
                settled[variables.stored[stage, value]] = 1.0
        for node in range(variables.forward):
            self._choose(settled, values, 0, node, again=False)
        fixed = self.program.lower > 0
        settled[fixed] = self.program.lower[fixed]
        for (first, second), product in variables.products.items():
            settled[product] = settled[first] * settled[second]
        self._set_remaining(settled)
        settle_equations(self.program, settled)
        return settled

    def _set_remaining(self, settled: Floats) -> None:
        """Derive p from r and q."""
        variables = self.variables
        for (stage, value), column in variables.remaining.items():
            settled[column] = settled[variables.recomputed[stage, variables.producer(value)]]
        for stage, node in variables.recomputed:
            for value, column in variables.overwriting(stage, node):
                if settled[column] and (stage, value) in variables.remaining:
                    settled[variables.remaining[stage, value]] = 0.0

    def _choose(
        self, settled: Floats, values: Floats, stage: int, node: int, *, again: bool
    ) -> None:
        """Set the delta of the implementation that the values choose."""
        ways = self.variables.implementations.ways(node, again=again)
        chosen = self._way(values, stage, node, again=again)
        for number, way in enumerate(ways if len(ways) > 1 else ()):
            settled[self.variables.chosen[stage, node, number]] = float(way is chosen)

    def _way(self, values: Floats, stage: int, node: int, *, again: bool) -> Implementation:
        ways = self.variables.implementations.ways(node, again=again)
        if len(ways) == 1:
            return ways[0]
        chosen = self.variables.chosen
        return ways[max(range(len(ways)), key=lambda n: values[chosen[stage, node, n]])]


def build_program(
    problem: Staged, implementations: Implementations, local_bound: LocalBound = "tight"
) -> MonetProgram:
    """Return MONeT's program (objective 9 under constraints 4, 7 and 8)."""
    builder = ProgramBuilder()
    variables = Variables(problem, implementations, builder, local_bound)
    for family in FAMILIES:
        family(variables)
    program = within_reach(builder.build(), map(variables.units, grains_of(problem)))
    return MonetProgram(variables=variables, program=program)
