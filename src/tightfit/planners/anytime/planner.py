"""The default planner: easy answers first, then a search for each promising order of the step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from tightfit._core import _engine
from tightfit.graph.ir import OpId
from tightfit.plan.plan import Compute, Outcome
from tightfit.planners.anytime.exhaustive import EXHAUSTIVE, solve_small
from tightfit.planners.anytime.pool import PooledSchedule
from tightfit.planners.anytime.search import FirstPlan, Search
from tightfit.planners.anytime.seeds import add_greedy_plan
from tightfit.planners.anytime.strategy import run_search
from tightfit.planners.base import Limits, Task
from tightfit.planners.engine.build import build_problem
from tightfit.planners.engine.greedy import fits_without_recomputation, prove_by_working_set
from tightfit.planners.engine.problem import EngineProblem, computes_of
from tightfit.planners.orders.least_peak import LeastPeak
from tightfit.planners.orders.others import (
    MOST_ORDERED,
    MOST_SEARCHED,
    order_for,
    order_only,
    other_orders,
)
from tightfit.planners.orders.reorder import in_traced_order, reorder
from tightfit.planners.outcomes import Bound, finish, no_plan
from tightfit.progress import Progress, shown

_TRACED = "traced"
_BETTER = 0.002  # overhead by which another order's greedy plan has to be better
_SEEDS = 3  # schedules handed on
_FIRST_SHARE = 0.6  # of the time for the more promising order


def plan_anytime(task: Task, limits: Limits, progress: Progress) -> Outcome:
    """Plan with a proven bound, as good as the limits allow (docs/search.md).

    Returns the best verified plan and the best proven bound when the gap is closed, the limits are
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
    seeds: Sequence[PooledSchedule] = (),
) -> AnytimeResult:
    """As `plan_anytime`; `seeds`: schedules of the graph in traced order, at another budget."""
    started = time.perf_counter()
    easy = fits_without_recomputation(task, limits, started)
    least = None
    if easy is None and not task.keeps_order and len(task.graph.ops) <= MOST_ORDERED:
        least = order_for(task, limits)
        easy = order_only(task, least, limits, started)
    if easy is not None and easy.status == "optimal":
        return _at_once(easy)
    if easy is None:
        proof = _prove_infeasible(task, least, started)
        if proof is not None:
            return _at_once(proof)
    problem = build_problem(task)
    small = solve_small(task, problem, limits, started)
    if small is not None and small.plan is None:
        small = _solve_small_in_others(task, least, limits, started)
    if small is not None:
        return _at_once(_better(small, easy))
    orders = _Orders(task, limits, progress, started)
    with contextlib.suppress(KeyboardInterrupt), shown(progress, "plan", at_most_s=limits.seconds):
        orders.run(problem, seeds, least)
    return AnytimeResult(_better(orders.outcome(), easy), orders.first, orders.schedules())


def _prove_infeasible(task: Task, least: LeastPeak | None, started: float) -> Outcome | None:
    """Return the proof that in every order some op alone needs more than the budget."""
    proof = prove_by_working_set(task, started)
    if proof is not None:
        others = (other for _, _, other in _in_other_orders(task, least))
        if any(prove_by_working_set(other, started) is None for other in others):
            return None
    return proof


def _in_other_orders(
    task: Task, least: LeastPeak | None
) -> Iterator[tuple[tuple[OpId, ...], str, Task]]:
    """Yield the other orders that plans may take, with their names and the task in each."""
    orders = {} if task.keeps_order else other_orders(task.graph, least)
    for ops, name in orders.items():
        yield ops, name, msgspec.structs.replace(task, graph=reorder(task.graph, ops))


def _solve_small_in_others(
    task: Task, least: LeastPeak | None, limits: Limits, started: float
) -> Outcome | None:
    """Return the optimum in the first other order that has a plan, the traced one having none.

    If none has, the proof that no order has; None if the problem in some order is too large.
    """
    for order, _, other in _in_other_orders(task, least):
        found = solve_small(other, build_problem(other), limits, started)
        if found is None:
            return None
        if found.plan is not None:
            steps = in_traced_order(found.plan.computes, order)
            bound = Bound(found.bound, EXHAUSTIVE)
            return finish(task, steps, bound=bound, started=started, gap=limits.gap)
    return no_plan(started=started, proven=True, bound_source=EXHAUSTIVE)


def _better(found: Outcome, easy: Outcome | None) -> Outcome:
    """Return the result, or a plan without recomputation that costs less.

    That may be in an order in which nothing else was found.
    """
    if easy is None or (found.plan is not None and found.overhead <= easy.overhead):
        return found
    return easy


def _at_once(easy: Outcome) -> AnytimeResult:
    """Return an answer that needed no search."""
    first = None if easy.plan is None else FirstPlan(easy.seconds, easy.overhead)
    return AnytimeResult(easy, first)


@dataclass(frozen=True)
class _Order:
    """An order of first computations by name, as ops of the graph, and the search in it."""

    name: str
    ops: tuple[OpId, ...]
    search: Search

    @property
    def bound(self) -> float:
        return max(self.search.pool.bound, self.search.relaxed.trivial_bound)

    def computes(self) -> list[Compute]:
        """The best plan found, in the graph's own ids."""
        problem, best = self.search.problem, self.search.pool.best
        assert best is not None
        schedule = _engine.Schedule(problem.engine, problem.budget_bytes)
        best.load(schedule)
        return in_traced_order(computes_of(problem, schedule.computes()), self.ops)


class _Orders:
    """The searches of one or two orders, and their results."""

    def __init__(self, task: Task, limits: Limits, progress: Progress, started: float) -> None:
        self.task = task
        self.limits = limits
        self.progress = progress
        self.started = started
        self.tried: list[_Order] = []
        self.first: FirstPlan | None = None

    def run(
        self, problem: EngineProblem, seeds: Sequence[PooledSchedule], least: LeastPeak | None
    ) -> None:
        """A first plan in the traced order, then the search, of a better order first.

        `problem`: the task in the traced order. `seeds`: schedules in that order to start from.
        `least`: the order that needs the least memory with nothing recomputed, if it was looked
        for.
        """
        traced = self._start(_TRACED, tuple(range(len(self.task.graph.ops))), self.task, problem)
        add_greedy_plan(traced)
        for seed in seeds:
            traced.pool.add_seed(seed)
        traced.repair_seeds()
        self._note_first(traced)
        waiting = self._promising([traced, *self._others(least)])
        for number, search in enumerate(waiting):
            first = waiting[0].pool
            if number > 0 and first.done and first.best is not None and search.pool.best is None:
                self._forget(search)
                continue  # another order is solved and this has not even a plan: not tried
            search.pool.learn(min(known.pool.overhead for known in waiting[: number + 1]))
            seconds = self.limits.seconds - (time.perf_counter() - self.started)
            share = _FIRST_SHARE if number + 1 < len(waiting) else 1.0
            search.clock.restart(max(0.05, share * seconds))
            try:
                run_search(search)
            finally:
                self._note_first(search)

    def _start(
        self, name: str, ops: tuple[OpId, ...], task: Task, problem: EngineProblem
    ) -> Search:
        search = Search(task, problem, self.limits, self.progress, time.perf_counter())
        self.tried.append(_Order(name, ops, search))
        return search

    def _note_first(self, search: Search) -> None:
        if self.first is None and search.first is not None:
            offset = search.clock.started - self.started
            self.first = FirstPlan(offset + search.first.seconds, search.first.overhead)

    def _others(self, least: LeastPeak | None) -> list[Search]:
        """The searches in other orders, each begun with a greedy plan."""
        searches: list[Search] = []
        if len(self.task.graph.ops) > MOST_SEARCHED:
            return []
        for ops, name, task in _in_other_orders(self.task, least):
            search = self._start(name, ops, task, build_problem(task))
            add_greedy_plan(search)
            searches.append(search)
        return searches

    def _promising(self, searches: list[Search]) -> list[Search]:
        """The searches to run, the more promising first: two if greedy plans can be compared.

        If there is none yet, any order may be the only one with a plan, so all are.
        """
        traced, *others = searches
        if all(search.pool.overhead == math.inf for search in searches):
            return searches
        best = min(others, key=lambda search: search.pool.overhead, default=traced)
        better = best.pool.overhead < traced.pool.overhead - _BETTER
        kept = [best, traced] if better else [traced]
        for search in others:
            if search not in kept:
                self._forget(search)
        return kept

    def _forget(self, search: Search) -> None:
        """Take an order for not tried."""
        self.tried = [order for order in self.tried if order.search is not search]

    def outcome(self) -> Outcome:
        """Verify and price the best plan; the bound is the least over the orders."""
        if not self.tried:
            return no_plan(started=self.started, proven=False)
        bound, source = min((o.bound, o.search.pool.bound_source) for o in self.tried)
        names = ", ".join(order.name for order in self.tried)
        note = f"orders tried: {names}" if len(self.tried) > 1 else ""
        best = min(self.tried, key=lambda order: order.search.pool.overhead)
        if best.search.pool.best is None:
            return no_plan(
                started=self.started,
                proven=bound == math.inf,
                bound=bound,
                bound_source=source,
                note=note,
            )
        proven, gap = Bound(bound, source), self.limits.gap
        computes = best.computes()
        return finish(self.task, computes, bound=proven, started=self.started, gap=gap, note=note)

    def schedules(self) -> tuple[PooledSchedule, ...]:
        """The best schedules in the traced order."""
        traced = [order.search for order in self.tried if order.name == _TRACED]
        return tuple(plan for search in traced for plan in search.pool.plans[:_SEEDS])
