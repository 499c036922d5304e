"""One piece of search: repair a schedule, then anneal around it.

See docs/search.md, "Large-neighbourhood search".
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tightfit._core import _engine
from tightfit.planners.anytime.pool import PooledSchedule
from tightfit.planners.engine.problem import EngineProblem

_COLD = 1e-5  # final temperature, as a fraction of the baseline cost


def _settings(
    candidates: int, fill: int, *, local: bool, window: int = 0, steps: int = 200
) -> _engine.Settings:
    settings = _engine.Settings()
    settings.drop_candidates = candidates
    settings.fill_limit = fill
    settings.local_fill = local
    settings.batch = local
    settings.window = window
    settings.relieve_steps = steps
    return settings


COARSE = _settings(24, 200, local=False)
LOCAL = _settings(12, 60, local=True, window=8, steps=30)
MIXED = _settings(12, 100, local=True)


@dataclass(frozen=True)
class Job:
    """A start, a temperature (a fraction of the baseline cost), a length, a seed."""

    start: PooledSchedule | None  # None: keep everything
    hot: float
    settings: _engine.Settings
    seconds: float
    iterations: int  # negative: `seconds` limits the job instead
    seed: int
    target: int
    # Search with the cheapest variant of every op, so that a workspace that does not fit shows as
    # overflow to be relieved and not as a slower variant. The result may use any.
    fastest: bool = False


def polish(problem: EngineProblem, schedule: _engine.Schedule, job: Job) -> PooledSchedule | None:
    """Run a job on a schedule of its own; return its end if that fits the budget."""
    schedule.set_fastest(job.fastest)
    if job.start is None:
        schedule.keep_everything()
    else:
        job.start.load(schedule)
    search = _engine.Search(schedule, job.seed, job.settings)
    search.descend(1e9 if job.iterations >= 0 else max(1.0, job.seconds))
    if job.seconds > 0 or job.iterations > 0:
        hot = job.hot * problem.baseline_cost
        cold = min(job.hot, _COLD) * problem.baseline_cost
        search.improve(job.seconds, job.iterations, hot, cold, job.target)
    if job.fastest:
        schedule.set_fastest(False)
        search.descend(1e9 if job.iterations >= 0 else max(1.0, job.seconds))
    return PooledSchedule.of(schedule) if schedule.fits else None


class Rates:
    """Which settings gain most per unit of search: a bandit that explores 15 times in 100."""

    def __init__(self, settings: Sequence[_engine.Settings]) -> None:
        self.settings = settings
        self.gains = [0.0] * len(settings)
        self.tried = [False] * len(settings)

    def choose(self, random_: random.Random) -> _engine.Settings:
        """Return untried settings, then mostly the best ones."""
        if not all(self.tried):
            return self.settings[self.tried.index(False)]
        if random_.random() < 0.15:
            return random_.choice(self.settings)
        return self.settings[self.gains.index(max(self.gains))]

    def learn(self, job: Job, found: PooledSchedule | None, best: PooledSchedule | None) -> None:
        """Take in the gain of a job over the best schedule known when it began."""
        if job.settings not in self.settings or job.start is None or best is None:
            return
        number = self.settings.index(job.settings)
        length = job.iterations if job.iterations > 0 else job.seconds
        gained = max(0, best.cost - found.cost) if found is not None else 0
        gain = gained / max(length, 1e-9)
        self.gains[number] = 0.5 * (self.gains[number] + gain) if self.tried[number] else gain
        self.tried[number] = True
