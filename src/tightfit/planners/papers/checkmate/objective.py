"""The objective of Checkmate's program, and its values as an overhead."""

from __future__ import annotations

import math

from tightfit.planners.papers.stages.scale import COST_UNITS


def overhead_of(objective: float) -> float:
    """Return the overhead (a fraction) of an objective sum_t sum_i C_i R[t,i] (equation 1a).

    Costs are in percent of a step without recomputation and belong to the columns of R.
    """
    if not math.isfinite(objective):
        return math.inf if objective > 0 else 0.0
    return max(0.0, objective / COST_UNITS - 1.0)


def objective_of(overhead: float) -> float:
    """Return the objective that means an overhead (a fraction)."""
    return COST_UNITS * (1.0 + overhead)
