"""Two-phase rounding of Checkmate's linear relaxation (section 4 of the conference paper).

Phase one rounds S: above one half, or at random with S as the probability. Phase two computes
the least R for it. The relaxation is solved at 0.9 of the budget, since rounding uses more.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tightfit.plan.plan import Compute
from tightfit.planners.papers.stages.schedule import recompute
from tightfit.planners.papers.stages.staged import Residency, Staged
from tightfit.planners.solvers.program import Floats

ROUNDING_SHARE = 0.9
"""The share of the budget at which the relaxation is solved for rounding."""


def rounded_schedules(
    problem: Staged, residency: Floats, *, draws: int, seed: int
) -> Iterator[list[Compute]]:
    """Yield the deterministic rounding of S, then `draws` random ones.

    `residency` (n + 1, values): S of the relaxation. `draws`: how many random roundings.
    """
    yield recompute(problem, _bit_sets(residency > 0.5))
    generator = np.random.default_rng(seed)
    for _ in range(draws):
        yield recompute(problem, _bit_sets(generator.random(residency.shape) < residency))


def _bit_sets(chosen: np.ndarray) -> Residency:
    return [sum(1 << value for value in np.nonzero(row)[0].tolist()) for row in chosen]
