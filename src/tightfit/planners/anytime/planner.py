"""The default planner: easy answers first, then a search for each promising order of the step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tightfit._core import _engine
from tightfit.graph.ir import OpId
from tightfit.plan.plan import Compute, Outcome
from tightfit.planners.anytime.exhaustive import solve_small
from tightfit.planners.anytime.order import frees_early, in_traced_order, reorder
from tightfit.planners.anytime.pool import PooledSchedule
from tightfit.planners.anytime.search import FirstPlan, Run
from tightfit.planners.base import Limits, Task
from tightfit.planners.engine.build import build_problem
from tightfit.planners.engine.greedy import fits_without_recomputation, prove_by_working_set
from tightfit.planners.engine.problem import computes_of
from tightfit.planners.outcomes import finish, no_plan
from tightfit.progress import Progress

__all__ = ["AnytimeResult", "FirstPlan", "plan_anytime", "run_anytime"]

_MOST_OPS = 3000  # of graphs for which other orders are tried
_BETTER = 0.002  # overhead by which another order's greedy plan has to be better
_SEEDS = 3  # schedules handed on
_FIRST_SHARE = 0.6  # of the time for the more promising order


def plan_anytime(task: Task, limits: Limits, progress: Progress) -> Outcome:
    """Plan with a proven bound, as good as the limits allow (planning.md).

    Returns
    -------
    Outcome
        The best verified plan and the best proven bound when the gap is closed, the limits are
        reached or the search is interrupted. The bound is the least over the orders of first
        computations that were tried; the note names them if there are several.
    """
    return run_anytime(task, limits, progress).outcome


@dataclass(frozen=True)
class AnytimeResult:
    """An outcome, when the first plan was there, and the schedules worth starting from again."""

    outcome: Outcome
    first: FirstPlan | None
    schedules: tuple[PooledSchedule, ...] = ()


def run_anytime(
    task: Task,
    limits: Limits,
    progress: Progress,
    *,
    alternatives: bool = True,
    seeds: Sequence[PooledSchedule] = (),
) -> AnytimeResult:
    """As `plan_anytime`, with what else is known.

    Parameters
    ----------
    alternatives : bool
        False: first computations use the default alternatives.
    seeds : sequence of PooledSchedule
        Schedules of the same graph and traced order at another budget.
    """
    started = time.perf_counter()
    easy = prove_by_working_set(task, started)
    if easy is None:
        easy = fits_without_recomputation(task, limits, started)
        if easy is not None and alternatives and easy.status != "optimal":
            easy = None
    if easy is None:
        problem = build_problem(task, alternatives=alternatives)
        easy = solve_small(task, problem, limits, started)
    if easy is not None:
        first = None if easy.plan is None else FirstPlan(easy.seconds, easy.overhead)
        return AnytimeResult(easy, first)
    search = _Search(task, limits, progress, started, alternatives=alternatives)
    search.seeds = seeds
    progress.start("plan")
    with contextlib.suppress(KeyboardInterrupt):
        search.run()
    progress.stop()
    return AnytimeResult(search.outcome(), search.first, search.schedules())


@dataclass(frozen=True)
class _Order:
    """An order of first computations, and the task in it."""

    name: str
    ops: tuple[OpId, ...]
    task: Task


class _Search:
    """Runs over one or two orders, and what came of them."""

    def __init__(
        self,
        task: Task,
        limits: Limits,
        progress: Progress,
        started: float,
        *,
        alternatives: bool,
    ) -> None:
        self.task = task
        self.limits = limits
        self.progress = progress
        self.started = started
        self.alternatives = alternatives
        self.runs: list[tuple[_Order, Run]] = []
        self.first: FirstPlan | None = None
        self.seeds: Sequence[PooledSchedule] = ()

    def run(self) -> None:
        """A first plan in the traced order, then the search, of a better order first."""
        traced = self.start(_Order("traced", tuple(range(len(self.task.graph.ops))), self.task))
        traced.first_plan()
        for seed in self.seeds:
            traced.pool.add_seed(seed)
        traced.repair_seeds()
        self.note_first(traced)
        waiting = [traced]
        other = self.better_order(traced)
        if other is not None:
            waiting.insert(0 if other.pool.overhead < math.inf else 1, other)
        for number, run in enumerate(waiting):
            if number > 0 and waiting[0].pool.done and run.pool.best is None:
                self.runs = [(order, kept) for order, kept in self.runs if kept is not run]
                continue  # one order is solved and this one has not even a plan: not tried
            run.pool.learn(min(known.pool.overhead for known in waiting[: number + 1]))
            seconds = self.limits.seconds - (time.perf_counter() - self.started)
            share = _FIRST_SHARE if number + 1 < len(waiting) else 1.0
            run.restart_clock(max(0.05, share * seconds))
            try:
                run.search()
            finally:
                self.note_first(run)

    def start(self, order: _Order) -> Run:
        """Begin the run of an order."""
        problem = build_problem(order.task, alternatives=self.alternatives)
        run = Run(order.task, problem, self.limits, self.progress, time.perf_counter())
        self.runs.append((order, run))
        return run

    def note_first(self, run: Run) -> None:
        """Remember when the first plan was there."""
        if self.first is None and run.first is not None:
            offset = run.started - self.started
            self.first = FirstPlan(offset + run.first.seconds, run.first.overhead)

    def better_order(self, traced: Run) -> Run | None:
        """The run of the order that frees early, if its greedy plan is better than the traced one.

        Also if neither has a greedy plan: then it may be the only one that fits.
        """
        graph = self.task.graph
        if len(graph.ops) > _MOST_OPS:
            return None
        ops = frees_early(graph)
        if ops == tuple(range(len(ops))):
            return None
        task = msgspec.structs.replace(self.task, graph=reorder(graph, ops))
        run = self.start(_Order("frees early", ops, task))
        run.first_plan()
        here, there = traced.pool.overhead, run.pool.overhead
        if there < here - _BETTER or here == there == math.inf:
            return run
        self.runs.pop()
        return None

    def outcome(self) -> Outcome:
        """Verify and price the best plan; the bound is the least over the orders."""
        found = [(run.pool.overhead, k) for k, (_, run) in enumerate(self.runs)]
        if not found:
            return no_plan(started=self.started, proven=False)
        bounds = [(self.bound(run), run.pool.bound_source) for _, run in self.runs]
        bound, source = min(bounds)
        names = ", ".join(order.name for order, _ in self.runs)
        note = f"orders tried: {names}" if len(self.runs) > 1 else ""
        overhead, best = min(found)
        if overhead == math.inf:
            proven = bound == math.inf
            return no_plan(
                started=self.started,
                proven=proven,
                bound=0.0 if proven else bound,
                bound_source=source,
                note=note,
            )
        return finish(
            self.task,
            self.computes(best),
            bound=bound,
            bound_source=source,
            started=self.started,
            gap=self.limits.gap,
            note=note,
        )

    def schedules(self) -> tuple[PooledSchedule, ...]:
        """The best schedules in the traced order."""
        traced = [run for order, run in self.runs if order.name == "traced"]
        return tuple(plan for run in traced for plan in run.pool.plans[:_SEEDS])

    @staticmethod
    def bound(run: Run) -> float:
        """The proven bound of one order."""
        return max(run.pool.bound, run.trivial)

    def computes(self, number: int) -> list[Compute]:
        """The best plan of a run in the graph's own ids."""
        order, run = self.runs[number]
        best = run.pool.best
        assert best is not None
        schedule = _engine.Schedule(run.problem.engine, run.problem.budget_bytes)
        best.load(schedule)
        return in_traced_order(computes_of(run.problem, schedule), order.ops)
