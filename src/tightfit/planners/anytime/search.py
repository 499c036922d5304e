"""The state of one search for plans of one order of first computations, and its pieces.

The value of each piece: docs/search.md, "Large-neighbourhood search". Their order is in `strategy`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tightfit._core import _engine
from tightfit.planners.anytime.clock import Clock
from tightfit.planners.anytime.polish import COARSE, LOCAL, MIXED, Job, Rates, polish
from tightfit.planners.anytime.pool import Pool, PooledSchedule, cross
from tightfit.planners.anytime.relaxation import relaxed
from tightfit.planners.base import Limits, Task
from tightfit.planners.engine.problem import EngineProblem
from tightfit.progress import Progress
from tightfit.units import format_percent

_LARGE = 1000  # ops from which on long searches beat many short ones
_FASTEST_SHARE = 0.5  # of the pieces of search that see only the fastest variants


@dataclass(frozen=True)
class FirstPlan:
    """When the first plan was there, in seconds from the start, and its overhead (a fraction)."""

    seconds: float
    overhead: float


class Search:
    """One search: its pool, its clock, its random choices.

    `task`: the graph in the order that is searched, and the budget. `started`: `time.perf_counter`
    when it began.
    """

    def __init__(
        self, task: Task, problem: EngineProblem, limits: Limits, progress: Progress, started: float
    ) -> None:
        self.task = task
        self.problem = problem
        self.relaxed = relaxed(problem)
        self.progress = progress
        self.clock = Clock(limits, started)
        self.pool = Pool(problem, limits.gap)
        self.random = random.Random(limits.seed)
        self.rates = Rates((COARSE, LOCAL))
        self.schedules = [
            _engine.Schedule(problem.engine, problem.budget_bytes)
            for _ in range(max(1, limits.workers))
        ]
        self.first: FirstPlan | None = None
        self.last_overhead = math.inf  # of the jobs run last
        self.jobs = 0

    @property
    def limits(self) -> Limits:
        """The limits, with the seconds that its clock was given last."""
        return self.clock.limits

    @property
    def ops(self) -> int:
        return self.relaxed.ops

    def left(self) -> float:
        """Seconds left; under an iteration limit the same share of them."""
        return self.clock.left()

    def report(self) -> None:
        """Tell the progress the state; the point of interruption."""
        best = format_percent(self.pool.overhead) if self.pool.best else "no plan yet"
        self.progress.update(self.jobs, f"best {best}, bound {format_percent(self.pool.bound)}")

    def run(self, jobs: Sequence[Job], threads: ThreadPoolExecutor | None = None) -> None:
        """Run jobs side by side and add their results, in the order of the jobs."""
        pairs = list(zip(self.schedules, jobs, strict=False))
        if threads is None or len(jobs) == 1:
            found = [polish(self.problem, schedule, job) for schedule, job in pairs]
        else:
            running = [threads.submit(polish, self.problem, *pair) for pair in pairs]
            found = [future.result() for future in running]
        costs = [result.cost for result in found if result is not None]
        self.last_overhead = self.problem.overhead(min(costs)) if costs else math.inf
        for job, result in zip(jobs, found, strict=False):
            self.rates.learn(job, result, self.pool.best)
        self.add(found)

    def add(self, found: Sequence[PooledSchedule | None]) -> None:
        """Take in results; note the first plan."""
        for result in found:
            self.pool.add(result)
        if self.first is None and self.pool.best is not None:
            self.first = FirstPlan(self.clock.elapsed(), self.pool.overhead)

    def repair_seeds(self) -> None:
        """Bring completed programs below the budget."""
        while not self.pool.done and (seed := self.pool.take_seed()) is not None:
            self.repair(seed)

    def repair(self, seed: PooledSchedule) -> None:
        self.run([self.job(seed, 1e-4, COARSE, 0.0)])

    def job(
        self, start: PooledSchedule | None, hot: float, settings: _engine.Settings, seconds: float
    ) -> Job:
        """Return a piece of search of the given length, within the limits; 0 s: repair only."""
        self.jobs += 1
        iterations = (
            0 if self.clock.counts_iterations and seconds <= 0 else self.clock.take_iterations()
        )
        return Job(
            start=start,
            hot=hot,
            settings=settings,
            seconds=min(seconds, max(0.0, self.left())),
            iterations=iterations,
            seed=self.limits.seed * 1_000_003 + self.jobs,
            target=self.pool.target,
            fastest=self.problem.engine.has_trade_offs and self.random.random() < _FASTEST_SHARE,
        )

    def next_job(self) -> Job:
        seed = self.pool.take_seed()
        if seed is not None:
            return self.job(seed, 2e-4, self._any_settings(), self._step)
        return self._next_large() if self.ops >= _LARGE else self._next_small()

    @property
    def _step(self) -> float:
        """Seconds of one piece of search."""
        return min(1.0, max(0.12, self.ops / 1600))

    def _any_settings(self) -> _engine.Settings:
        return self.random.choice((COARSE, LOCAL, MIXED))

    def _next_small(self) -> Job:
        """Restarts first, then crossover of good plans and hot kicks."""
        early = self.left() > 0.4 * self.limits.seconds
        restart = 0.7 if early else 0.05
        if self.relaxed.has_choices:
            restart *= 0.3  # a restart forgets the alternatives chosen
        if len(self.pool.plans) < 2 or self.random.random() < restart:
            hot = 10 ** self.random.uniform(-4.0, -2.5)
            return self.job(None, hot, MIXED, self._step)
        if self.random.random() < 0.7:
            hot = 10 ** self.random.uniform(-4.5, -3.5)
            return self.job(self._child(), hot, self._any_settings(), self._step)
        hot = 10 ** self.random.uniform(-4.0, -2.3)
        return self.job(self.pool.pick(self.random, 2.0), hot, MIXED, self._step)

    def _next_large(self) -> Job:
        """Long searches around the best plan, now and then a crossover."""
        if len(self.pool.plans) >= 2 and self.random.random() < 0.25:
            hot = 10 ** self.random.uniform(-4.5, -3.5)
            return self.job(self._child(), hot, self._any_settings(), 0.7 * self._step)
        settings = self.rates.choose(self.random)
        return self.job(self.pool.best, 1e-4, settings, max(2.0, 0.12 * self.limits.seconds))

    def _child(self) -> PooledSchedule:
        """A crossover of two plans of the pool."""
        a = self.pool.pick(self.random, 1.5)
        others = [plan for plan in self.pool.plans if plan is not a]
        b = self.random.choice(others) if others else a
        return cross(self.problem, a, b, self.random)
