"""The objective of MONeT's program, and its values as an overhead."""

from __future__ import annotations

import math

from tightfit.planners.papers.stages.scale import COST_UNITS


def overhead_of(objective: float) -> float:
    """Return the overhead (a fraction) of an objective of equation 9.

    Forward, backward and recomputation costs are in percent of a step without recomputation and
    belong to the columns of r and delta; nodes without a choice are one constant column.
    """
    if not math.isfinite(objective):
        return math.inf if objective > 0 else 0.0
    return max(0.0, objective / COST_UNITS - 1.0)
