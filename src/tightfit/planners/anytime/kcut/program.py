"""The K-cut program put together, and the reading of its solutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tightfit.planners.anytime.kcut.constraints import FAMILIES
from tightfit.planners.anytime.kcut.link import limit_moves
from tightfit.planners.anytime.kcut.variables import COST_UNITS, Allowed, Movable, Variables
from tightfit.planners.anytime.relaxation import RelaxedProblem
from tightfit.planners.solvers import LinearProgram, Solution, grains, within_reach

Key = TypeVar("Key", bound=int | tuple[int, ...])


@dataclass(frozen=True)
class CutProgram:
    """The program with its columns by name."""

    variables: Variables
    program: LinearProgram

    def overhead(self, objective: float) -> float:
        return (objective + self.variables.constant) / COST_UNITS - 1.0

    def chosen_alternatives(self, solution: Solution) -> dict[int, int]:
        """The alternatives of first computations in a solution."""
        return dict(_set_in(solution, self.variables.chosen))

    def chosen_again(self, solution: Solution, k: int) -> dict[int, int]:
        """The alternatives of ops that run again in window k of a solution."""
        again = _set_in(solution, self.variables.chosen_again)
        return {op: way for window, op, way in again if window == k}

    def residents(self, solution: Solution, k: int) -> set[int]:
        """The values alive at cut k in a solution."""
        return {v for cut, v in _set_in(solution, self.variables.resident) if cut == k}

    def away(self, solution: Solution) -> set[int]:
        """The values in far memory at the cut in a solution, where values may be moved."""
        assert self.variables.moving is not None
        return set(_set_in(solution, self.variables.moving.away))


def _set_in(solution: Solution, columns: Mapping[Key, int]) -> list[Key]:
    """Return the keys of the binary columns that are 1 in a solution."""
    values = solution.values
    assert values is not None
    return [key for key, column in columns.items() if values[column] > 0.5]


def cut_program(
    relaxed: RelaxedProblem,
    budget_bytes: int,
    cuts: Sequence[int],
    *,
    allowed: Allowed | None = None,
    movable: Movable | None = None,
) -> CutProgram:
    """Return the program with the given cuts.

    `budget_bytes`: the engine's budget (constants subtracted). `cuts`: ops of the engine,
    ascending. `allowed`: per window the ops that may be computed again in it (None: all); a
    restriction makes the optimum no bound, but a good seed of large graphs. `movable`: values that
    may be moved to far memory, in a program with one cut; None: none.
    """
    variables = Variables(relaxed, budget_bytes, cuts, allowed, movable)
    for k in range(len(variables.cuts)):
        for family in FAMILIES:
            family(variables, k)
    if variables.moving is not None:
        limit_moves(variables, variables.moving)
    sizes = [s for value, s in enumerate(relaxed.problem.sizes) if relaxed.rewritable[value]]
    found = [variables.units(grain) for grain in grains(sizes, budget_bytes)]
    program = within_reach(variables.builder.build(), found)
    return CutProgram(variables=variables, program=program)
