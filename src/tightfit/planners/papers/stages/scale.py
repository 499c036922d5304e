"""The numbers of a staged problem scaled for a solver: moderate for every model's size."""

from __future__ import annotations

import math

from tightfit.planners.papers.stages.staged import Staged
from tightfit.planners.solvers import grains

CAPACITY_UNITS = 1000.0
"""The capacity in a program's unit of memory; HiGHS needs coefficients of moderate size."""

COST_UNITS = 100.0
"""The cost of a step without recomputation in a program's unit: percent."""


class Scaled:
    """A staged problem in a program's units."""

    def __init__(self, problem: Staged) -> None:
        self.problem = problem
        self._base_cost_s = problem.base_cost_s

    def units(self, size_bytes: int) -> float:
        """Return bytes in thousandths of the capacity."""
        return size_bytes * CAPACITY_UNITS / self.problem.capacity_bytes

    def cost(self, cost_s: float) -> float:
        """Return seconds in percent of a step without recomputation."""
        return COST_UNITS * cost_s / self._base_cost_s if self._base_cost_s > 0 else 0.0


def overhead_of(objective: float) -> float:
    """Return the overhead (a fraction) of an objective.

    An objective is a sum of costs in percent of a step without recomputation. In Checkmate that is
    sum_t sum_i C_i R[t,i] (equation 1a), in MONeT the columns of r and delta (equation 9).
    """
    if not math.isfinite(objective):
        return math.inf if objective > 0 else 0.0
    return max(0.0, objective / COST_UNITS - 1.0)


def describe(objective: float, bound: float) -> str:
    """Return the state of a solver for people."""
    return f"overhead {overhead_of(objective):.4f}, bound {overhead_of(bound):.4f}"


def objective_of(overhead: float) -> float:
    """Return the objective that means an overhead (a fraction)."""
    return COST_UNITS * (1.0 + overhead)


def grains_of(problem: Staged) -> list[int]:
    """Return common divisors of the bytes of values that may be made again."""
    sizes = [value.size_bytes for value in problem.values.values() if value.recoverable]
    return grains(sizes, problem.capacity_bytes)
