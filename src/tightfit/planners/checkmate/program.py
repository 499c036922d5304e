"""Checkmate's program put together, and the way between its solutions and schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tightfit.plan.plan import Compute
from tightfit.planners.checkmate.constraints import FAMILIES
from tightfit.planners.checkmate.variables import Variables
from tightfit.planners.schedule import residency_of, stages_of
from tightfit.planners.solvers import Program, ProgramBuilder
from tightfit.planners.solvers.program import Floats
from tightfit.planners.staged import Residency, Stage, Staged

__all__ = ["CheckmateProgram", "build_program"]


@dataclass(frozen=True)
class CheckmateProgram:
    """The program with its columns by name."""

    variables: Variables
    program: Program

    def residency(self, values: Floats) -> Floats:
        """Return S, shape (stages + 1, values), of a solution, fractional or not."""
        count = max(self.variables.problem.values, default=-1) + 1
        rows = np.zeros((len(self.variables.stages) + 1, count))
        for (stage, value), column in self.variables.resident.items():
            rows[stage, value] = values[column]
        return rows

    def computes(self, values: Floats) -> list[Compute]:
        """Return the computes of an integral solution in order (algorithm 1 without frees)."""
        return [
            self.variables.way(stage, node).compute
            for (stage, node), column in self.variables.computed.items()
            if values[column] > 0.5
        ]

    def start(self, computes: Sequence[Compute]) -> Floats:
        """Return the solution that a schedule with one first computation per stage means."""
        problem = self.variables.problem
        rows = residency_of(problem, computes)
        chosen = stages_of(problem, computes)
        values = np.zeros(self.program.columns)
        firsts = {s.first: t for t, s in enumerate(self.variables.stages) if s.first is not None}
        for stage, nodes in enumerate(chosen):
            for node in nodes:
                values[self.variables.computed[firsts[stage], node]] = 1.0
        self._set_residency(values, rows)
        self._set_memory(values)
        return values

    def _set_residency(self, values: Floats, rows: Residency) -> None:
        limits = [stage.limit for stage in self.variables.stages] + [len(rows) - 1]
        for (stage, value), column in self.variables.resident.items():
            values[column] = rows[limits[stage]] >> value & 1

    def _set_memory(self, values: Floats) -> None:
        """Derive FREE, DOUBLE and U from R and S."""
        variables = self.variables
        for (stage, value, node), column in variables.freed.items():
            hazards = [variables.resident.get((stage + 1, value))]
            hazards += [
                variables.computed[stage, reader]
                for reader in variables.readers[stage].get(value, ())
                if reader > node
            ]
            safe = not any(values[hazard] for hazard in hazards if hazard is not None)
            values[column] = float(safe and values[variables.computed[stage, node]] > 0.5)
        for (stage, value, node), column in variables.doubled.items():
            values[column] = min(
                values[variables.computed[stage, node]], values[variables.resident[stage, value]]
            )
        lows = self.program.row_lower
        for column in variables.used.values():
            values[column] = 0.0
        self._settle(values, set(variables.used.values()), lows)

    def _settle(self, values: Floats, used: set[int], row_lower: Floats) -> None:
        """Solve the equations of U, whose first entry is the column they define."""
        program = self.program
        equations = np.nonzero(row_lower == program.row_upper)[0]
        for row in equations.tolist():
            terms = slice(program.starts[row], program.starts[row + 1])
            columns = program.indices[terms]
            if int(columns[0]) in used:
                values[columns[0]] = -float(program.coefficients[terms][1:] @ values[columns[1:]])


def build_program(problem: Staged, stages: Sequence[Stage]) -> CheckmateProgram:
    """Return Checkmate's program over these stages (problem 9 of the paper)."""
    builder = ProgramBuilder()
    variables = Variables.of(problem, stages, builder)
    for family in FAMILIES:
        family(variables)
    return CheckmateProgram(variables=variables, program=builder.build())
