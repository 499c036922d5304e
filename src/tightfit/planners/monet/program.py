"""MONeT's program put together, and the schedules its solutions mean."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.plan.plan import Compute
from tightfit.planners.monet.constraints import FAMILIES
from tightfit.planners.monet.implementations import Implementations
from tightfit.planners.monet.variables import LocalBound, Variables
from tightfit.planners.solvers import Program, ProgramBuilder
from tightfit.planners.solvers.program import Floats
from tightfit.planners.staged import Staged, Way

__all__ = ["MonetProgram", "build_program"]


@dataclass(frozen=True)
class MonetProgram:
    """The program with its columns by name."""

    variables: Variables
    program: Program

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

    def _way(self, values: Floats, stage: int, node: int, *, again: bool) -> Way:
        implementations = self.variables.implementations
        ways = (implementations.again if again else implementations.first)[node]
        if len(ways) == 1:
            return ways[0]
        chosen = self.variables.chosen
        return max(enumerate(ways), key=lambda numbered: values[chosen[stage, node, numbered[0]]])[
            1
        ]


def build_program(
    problem: Staged, implementations: Implementations, local_bound: LocalBound = "tight"
) -> MonetProgram:
    """Return MONeT's program (objective 9 under constraints 4, 7 and 8)."""
    builder = ProgramBuilder()
    variables = Variables.of(problem, implementations, builder, local_bound)
    for family in FAMILIES:
        family(variables)
    return MonetProgram(variables=variables, program=builder.build())
