"""Checkmate's program put together, and the way between its solutions and schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tightfit.graph.ir import ValueId
from tightfit.plan.plan import Compute
from tightfit.planners.papers.checkmate.constraints import FAMILIES
from tightfit.planners.papers.checkmate.variables import Variables
from tightfit.planners.papers.stages.scale import grains_of
from tightfit.planners.papers.stages.schedule import stages_of
from tightfit.planners.papers.stages.staged import Stage, Staged
from tightfit.planners.solvers import LinearProgram, ProgramBuilder, settle_equations, within_reach
from tightfit.planners.solvers.program import Floats


@dataclass(frozen=True)
class CheckmateProgram:
    """The program with its columns by name."""

    variables: Variables
    program: LinearProgram

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
            self.variables.implementation(stage, node).compute
            for (stage, node), column in self.variables.computed.items()
            if values[column] > 0.5
        ]

    def start(self, computes: Sequence[Compute]) -> Floats:
        """Return the solution that a schedule with one first computation per stage means."""
        values = np.zeros(self.program.columns)
        firsts = {s.first: t for t, s in enumerate(self.variables.stages) if s.first is not None}
        for stage, nodes in enumerate(stages_of(self.variables.problem, computes)):
            for node in nodes:
                values[self.variables.computed[firsts[stage], node]] = 1.0
        return self.settled(values)

    def settled(self, values: Floats) -> Floats:
        """Return the solution with R of these values, less values not read, and its own S.

        S holds a value from where it is made to where that instance is read last; FREE and
        U follow.
        """
        settled = np.zeros(self.program.columns)
        alive: set[ValueId] = set()
        self._set_residency(settled, len(self.variables.stages), alive)
        for stage in range(len(self.variables.stages) - 1, -1, -1):
            for node in reversed(self.variables.nodes[stage]):
                column = self.variables.computed[stage, node]
                if values[column] > 0.5 and self._read(stage, node, alive):
                    settled[column] = 1.0
            self._set_residency(settled, stage, alive)
        self._set_frees(settled)
        settle_equations(self.program, settled)
        return settled

    def _read(self, stage: int, node: int, alive: set[ValueId]) -> bool:
        """Whether a computation is needed, walking backwards; if so, update the live values."""
        problem, is_first = self.variables.problem, self.variables.stages[stage].first == node
        way = self.variables.implementation(stage, node)
        made = {value for value in way.writes if problem.makes(node, is_first, value)}
        if not is_first and made.isdisjoint(alive):
            return False
        alive -= made
        alive.update(way.reads)
        return True

    def _set_residency(self, values: Floats, stage: int, alive: set[ValueId]) -> None:
        for value in alive:
            column = self.variables.resident.get((stage, value))
            if column is not None:
                values[column] = 1.0
        for value, column in self.variables.forced[stage]:
            alive.discard(value)
            values[column] = 1.0

    def _set_frees(self, values: Floats) -> None:
        """Derive FREE from R and S."""
        variables = self.variables
        for (stage, value, node), column in variables.freed.items():
            if values[variables.computed[stage, node]] < 0.5:
                continue
            needed = variables.hazards(stage, value, node)
            resident = variables.resident.get((stage, value))
            second = variables.problem.values[value].producer == node and resident is not None
            if second and values[resident]:
                needed = []
            values[column] = float(not any(values[c] for c in needed))


def build_program(problem: Staged, stages: Sequence[Stage]) -> CheckmateProgram:
    """Return Checkmate's program over these stages (problem 9 of the paper)."""
    builder = ProgramBuilder()
    variables = Variables(problem, stages, builder)
    for family in FAMILIES:
        family(variables)
    program = within_reach(builder.build(), map(variables.units, grains_of(problem)))
    return CheckmateProgram(variables=variables, program=program)
