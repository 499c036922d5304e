"""One search for plans of one order of first computations.

The order of work (planning.md, sections 6 and 10): a greedy plan in milliseconds; the one-cut
program for a bound and a seed; then search beside cutting planes until the gap is closed or time
is up.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from tightfit._core import _engine
from tightfit.planners.anytime.bound import BoundWorker, CutLoop
from tightfit.planners.anytime.polish import COARSE, LOCAL, MIXED, Job, Rates, polish
from tightfit.planners.anytime.pool import Pool, PooledSchedule, cross
from tightfit.planners.anytime.relaxation import outline
from tightfit.planners.anytime.restricted import RestrictedLoop, worth_restricting
from tightfit.planners.anytime.seeds import (
    NODES,
    UNLIMITED_S,
    seed_with_chains,
    seed_with_margins,
    seed_with_others,
)
from tightfit.planners.base import Limits, Task
from tightfit.planners.engine.build import build_problem
from tightfit.planners.engine.greedy import descend
from tightfit.planners.engine.lower_limit import lower_limit
from tightfit.planners.engine.problem import EngineProblem
from tightfit.progress import Progress
from tightfit.units import format_percent

__all__ = ["FirstPlan", "Run"]

_LARGE = 1000  # ops from which on long searches beat many short ones
_FIRST_SOLVE_S = 1.0
_SHORT_SEARCH_S = 1.0
_CHEAP_CUTS_S = 2.0  # for programs before anything else, if each takes less than the first may
_DESCENT_S = 2.0
_DEFAULTS_SHARE = 0.2  # of the time, for the plan without alternatives
_LIMIT_S = 1.0
_RESTRICTED_SHARE = 0.35  # of the time for programs that only give seeds
_FASTEST_SHARE = 0.5  # of the pieces of search that see only the fastest variants
_JOB_ITERATIONS = 50  # at least, per piece of search under an iteration limit
_JOBS = 40  # pieces of search that the limit is divided into
_ROUNDS = 4  # programs after the first one under an iteration limit


@dataclass(frozen=True)
class FirstPlan:
    """When the first plan was there, in seconds from the start, and its overhead (a fraction)."""

    seconds: float
    overhead: float


class Run:
    """One search: its pool, its clock, its random choices."""

    def __init__(
        self,
        task: Task,
        problem: EngineProblem,
        limits: Limits,
        progress: Progress,
        started: float,
    ) -> None:
        self.task = task
        self.problem = problem
        self.limits = limits
        self.progress = progress
        self.started = started
        self.pool = Pool(problem, limits.gap)
        self.random = random.Random(limits.seed)
        self.ops = problem.engine.op_count
        self.outline = outline(problem)
        self.first: FirstPlan | None = None
        self.rates = Rates((COARSE, LOCAL))
        self.last_overhead = math.inf  # of the jobs run last
        self.jobs = 0
        self.trade_offs = problem.engine.has_trade_offs
        self.choices = any(self.outline.has_choice(op) for op in range(self.outline.ops))
        self.iterations_left = limits.iterations
        workers = max(1, limits.workers)
        self.schedules = [
            _engine.Schedule(problem.engine, problem.budget_bytes) for _ in range(workers)
        ]
        least = sum(
            cost
            for cost, required in zip(self.outline.first_cost, problem.required, strict=True)
            if required
        )
        self.trivial = problem.overhead(least) - 1e-9

    # ------------------------------------------------------------------------ the pipeline

    def search(self) -> None:
        """Fill the pool until the gap is closed or a limit is reached."""
        self.report()
        self.pool.raise_bound(self.trivial, "trivial")
        if self.pool.best is None:
            self.first_plan()
        self.report()
        self.prove_infeasible()
        loop = CutLoop(self.outline, self.pool, self.limits.solver)
        if self.limits.iterations is None:
            self.cut_while_cheap(loop)
        self.plan_with_defaults()
        if self.pool.done:
            return
        if self.limits.iterations is not None:
            self.search_by_iterations(loop)
            return
        self.search_shortly()
        seed_with_others(self)
        seed_with_margins(self, loop)
        if self.pool.done or self.left() < 0.1:
            return
        with BoundWorker(self.cut_loops(loop)) as worker, ThreadPoolExecutor() as threads:
            seed_with_chains(self)
            while not self.pool.done and self.left() > 0.02:
                self.report()
                free = max(1, len(self.schedules) - int(worker.alive))
                self.run([self.next_job() for _ in range(free)], threads)

    def cut_while_cheap(self, loop: CutLoop) -> None:
        """Solve programs with more and more cuts while each is quick: many gaps close so."""
        until = time.perf_counter() + min(_CHEAP_CUTS_S, 0.15 * self.left())
        seconds = min(_FIRST_SOLVE_S, max(0.05, 0.15 * self.left()))
        while not (self.pool.done or loop.finished):
            self.report()
            begun = time.perf_counter()
            loop.round(seconds)
            self.repair_seeds()
            if time.perf_counter() > min(until, begun + seconds):
                return

    def search_shortly(self) -> None:
        """Search as long as other methods would take at least; often nothing else is needed."""
        until = time.perf_counter() + min(_SHORT_SEARCH_S, 0.1 * self.left())
        with ThreadPoolExecutor() as threads:
            while not self.pool.done and time.perf_counter() < until:
                self.report()
                self.run([self.next_job() for _ in self.schedules], threads)

    def cut_loops(self, loop: CutLoop) -> list[tuple[CutLoop, float]]:
        """The cut loop for the bound; before it, on large graphs, one that only gives seeds."""
        loops = [(loop, self.started + self.limits.seconds)]
        if worth_restricting(loop):
            seeds = RestrictedLoop(self.outline, self.pool, self.limits.solver)
            loops.insert(0, (seeds, time.perf_counter() + _RESTRICTED_SHARE * self.left()))
        return loops

    def first_plan(self) -> None:
        """Descend greedily, several times at random if the first descent gets stuck."""
        schedule = self.schedules[0]
        limits = msgspec.structs.replace(self.limits, seconds=min(_DESCENT_S, self.limits.seconds))
        if self.limits.iterations is not None:
            limits = msgspec.structs.replace(limits, seconds=UNLIMITED_S)
        if descend(schedule, limits, self.progress, time.perf_counter()):
            self.add([PooledSchedule.of(schedule)])

    def plan_with_defaults(self) -> None:
        """With alternatives, start from the plan without: more freedom is never worse.

        Under an iteration limit this is the very plan that the same limit gives without.
        """
        if not self.choices or self.pool.done:
            return
        problem = build_problem(self.task, alternatives=False)
        share = 1.0 if self.limits.iterations is not None else _DEFAULTS_SHARE
        limits = msgspec.structs.replace(self.limits, seconds=share * self.left())
        run = Run(self.task, problem, limits, self.progress, time.perf_counter())
        run.pool.learn(min(self.pool.known, self.pool.overhead))
        try:
            run.search()
        finally:
            best = run.pool.best
            if best is not None:
                schedule = self.schedules[0]
                schedule.load(best.words, [0] * self.ops, [-1] * self.ops)
                self.add([PooledSchedule.of(schedule)])

    def prove_infeasible(self) -> None:
        """Look for an op that cannot be computed within the budget, if no plan came at once."""
        if self.pool.best is not None:
            return
        seconds = _LIMIT_S if self.limits.iterations is None else UNLIMITED_S
        asked = self.task.budget_bytes
        limit, _, _ = lower_limit(self.task, self.problem, seconds=seconds, enough_bytes=asked)
        if limit > asked:
            self.pool.raise_bound(math.inf, "backward set search")

    def search_by_iterations(self, loop: CutLoop) -> None:
        """The same in an order that depends on the seed only: programs and search in turns."""
        total = self.iterations_left or 0
        with ThreadPoolExecutor() as threads:
            for number in range(_ROUNDS + 1):
                if not (self.pool.done or loop.finished):
                    self.report()
                    loop.round(UNLIMITED_S, NODES)
                    self.repair_seeds()
                if number == 0:
                    seed_with_others(self)
                    seed_with_margins(self, loop, NODES)
                    seed_with_chains(self)
                rest = total * (_ROUNDS - number) // (_ROUNDS + 1)
                while not self.pool.done and (self.iterations_left or 0) > rest:
                    self.report()
                    self.run([self.next_job() for _ in self.schedules], threads)

    def restart_clock(self, seconds: float) -> None:
        """Let the search have these seconds from now on."""
        self.started = time.perf_counter()
        self.limits = msgspec.structs.replace(self.limits, seconds=seconds)

    def left(self) -> float:
        """Seconds left; under an iteration limit the same share of them."""
        if self.iterations_left is not None and self.limits.iterations:
            return self.limits.seconds * self.iterations_left / self.limits.iterations
        return self.limits.seconds - (time.perf_counter() - self.started)

    def report(self) -> None:
        """Tell the progress the state; the point of interruption."""
        best = format_percent(self.pool.overhead) if self.pool.best else "no plan yet"
        self.progress.update(self.jobs, f"best {best}, bound {format_percent(self.pool.bound)}")

    # ------------------------------------------------------------------------ pieces of search

    def run(self, jobs: Sequence[Job], threads: ThreadPoolExecutor | None = None) -> None:
        """Run jobs side by side and add what they find, in the order of the jobs."""
        if threads is None or len(jobs) == 1:
            found = [polish(self.problem, s, j) for s, j in zip(self.schedules, jobs, strict=False)]
        else:
            running = [
                threads.submit(polish, self.problem, s, j)
                for s, j in zip(self.schedules, jobs, strict=False)
            ]
            found = [future.result() for future in running]
        costs = [c.cost for c in found if c is not None]
        self.last_overhead = self.problem.overhead(min(costs)) if costs else math.inf
        for job, candidate in zip(jobs, found, strict=False):
            self.rates.learn(job, candidate, self.pool.best)
        self.add(found)

    def add(self, found: Sequence[PooledSchedule | None]) -> None:
        """Take in what was found; note the first plan."""
        for candidate in found:
            self.pool.add(candidate)
        if self.first is None and self.pool.best is not None:
            self.first = FirstPlan(time.perf_counter() - self.started, self.pool.overhead)

    def job(
        self,
        start: PooledSchedule | None,
        hot: float,
        settings: _engine.Settings,
        seconds: float,
    ) -> Job:
        """Return a piece of search of the given length, within the limits."""
        self.jobs += 1
        iterations = -1
        if self.iterations_left is not None:
            most = max(_JOB_ITERATIONS, (self.limits.iterations or 0) // _JOBS)
            iterations = min(most, self.iterations_left) if seconds > 0 else 0
            self.iterations_left -= iterations
        return Job(
            start=start,
            hot=hot,
            settings=settings,
            seconds=min(seconds, max(0.0, self.left())),
            iterations=iterations,
            seed=self.limits.seed * 1_000_003 + self.jobs,
            target=self.pool.target,
            fastest=self.trade_offs and self.random.random() < _FASTEST_SHARE,
        )

    def repair_seeds(self) -> None:
        """Bring completed programs below the budget."""
        while not self.pool.done and (seed := self.pool.take_seed()) is not None:
            self.run([self.job(seed, 1e-4, COARSE, 0.0)])

    def next_job(self) -> Job:
        """Choose what to search next."""
        seed = self.pool.take_seed()
        if seed is not None:
            return self.job(seed, 2e-4, self.any_settings(), self.step)
        return self.next_large() if self.ops >= _LARGE else self.next_small()

    @property
    def step(self) -> float:
        """Seconds of one piece of search."""
        return min(1.0, max(0.12, self.ops / 1600))

    def any_settings(self) -> _engine.Settings:
        """One of the search's settings at random."""
        return self.random.choice((COARSE, LOCAL, MIXED))

    def next_small(self) -> Job:
        """Restarts first, then crossover of good plans and hot kicks (planning.md, section 10)."""
        early = self.left() > 0.4 * self.limits.seconds
        restart = 0.7 if early else 0.05
        if self.choices:
            restart *= 0.3  # a restart forgets the alternatives chosen
        if len(self.pool.plans) < 2 or self.random.random() < restart:
            hot = 10 ** self.random.uniform(-4.0, -2.5)
            return self.job(None, hot, MIXED, self.step)
        if self.random.random() < 0.7:
            hot = 10 ** self.random.uniform(-4.5, -3.5)
            return self.job(self.child(), hot, self.any_settings(), self.step)
        hot = 10 ** self.random.uniform(-4.0, -2.3)
        return self.job(self.pool.pick(self.random, 2.0), hot, MIXED, self.step)

    def next_large(self) -> Job:
        """Long searches around the best plan, now and then a crossover."""
        if len(self.pool.plans) >= 2 and self.random.random() < 0.25:
            hot = 10 ** self.random.uniform(-4.5, -3.5)
            return self.job(self.child(), hot, self.any_settings(), 0.7 * self.step)
        settings = self.rates.choose(self.random)
        return self.job(self.pool.best, 1e-4, settings, max(2.0, 0.12 * self.limits.seconds))

    def child(self) -> PooledSchedule:
        """A crossover of two plans of the pool."""
        a = self.pool.pick(self.random, 1.5)
        others = [plan for plan in self.pool.plans if plan is not a]
        b = self.random.choice(others) if others else a
        linked = bool(self.problem.choices)
        return cross(a, b, self.ops, self.random, linked=linked)
