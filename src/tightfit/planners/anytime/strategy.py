"""The order of work of one search.

A greedy plan in milliseconds; programs with one cut and more while they are quick; the plan without
alternatives; a short search; schedules of other methods. Then search along with cutting planes
until the gap is closed or time is up (docs/search.md, "The order of work").
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec

from tightfit.planners.anytime.bound import BoundWorker, CutLoop
from tightfit.planners.anytime.restricted import RestrictedLoop, worth_restricting
from tightfit.planners.anytime.search import Search
from tightfit.planners.anytime.second_pass import seed_with_second_pass
from tightfit.planners.anytime.seeds import (
    NODES,
    UNLIMITED_S,
    add_greedy_plan,
    seed_with_chains,
    seed_with_margins,
    seed_with_others,
    take_over,
)
from tightfit.planners.engine.lower_limit import lower_limit
from tightfit.planners.engine.narrower import narrower_problem

_FIRST_SOLVE_S = 1.0
_SHORT_SEARCH_S = 1.0
_CHEAP_CUTS_S = 2.0  # for programs before anything else, if each takes less than the first may
_FEWER_WAYS_SHARE = 0.25  # of the time, for the plan with stricter alternatives or none
_LIMIT_S = 1.0
_LIMIT_SHARE, _LEAST_LIMIT_S = 0.2, 0.05  # of the time, to prove that no plan exists
_START_S = 2e-4  # per op, to begin a search
_RESTRICTED_SHARE = 0.35  # of the time for programs that only give seeds
_ROUNDS = 4  # programs after the first under an iteration limit


def run_search(search: Search) -> None:
    """Fill the pool until the gap is closed or a limit is reached."""
    search.report()
    search.pool.raise_bound(search.relaxed.trivial_bound, "trivial")
    if search.pool.best is None:
        add_greedy_plan(search)
    seed_with_second_pass(search)
    search.report()
    _prove_infeasible(search)
    loop = CutLoop(search.relaxed, search.pool, search.limits.solver)
    if not search.clock.counts_iterations:
        _cut_while_cheap(search, loop)
    _plan_with_fewer_ways(search)
    if search.pool.done:
        return
    if search.clock.counts_iterations:
        _run_by_iterations(search, loop)
        return
    _search_shortly(search)
    seed_with_others(search)
    seed_with_margins(search, loop)
    if search.pool.done or search.left() < 0.1:
        return
    with BoundWorker(_cut_loops(search, loop)) as worker, ThreadPoolExecutor() as threads:
        seed_with_chains(search)
        while not search.pool.done and search.left() > 0.02:
            search.report()
            free = max(1, len(search.schedules) - int(worker.alive))
            search.run([search.next_job() for _ in range(free)], threads)


def _run_by_iterations(search: Search, loop: CutLoop) -> None:
    """The same in an order that depends on the seed only: programs and search in turns."""
    total = search.clock.iterations_left or 0
    with ThreadPoolExecutor() as threads:
        for number in range(_ROUNDS + 1):
            if not (search.pool.done or loop.finished):
                search.report()
                loop.round(UNLIMITED_S, NODES)
                search.repair_seeds()
            if number == 0:
                seed_with_others(search)
                seed_with_margins(search, loop, NODES)
                seed_with_chains(search)
            rest = total * (_ROUNDS - number) // (_ROUNDS + 1)
            while not search.pool.done and (search.clock.iterations_left or 0) > rest:
                search.report()
                search.run([search.next_job() for _ in search.schedules], threads)


def _prove_infeasible(search: Search) -> None:
    """Look for an op that cannot be computed within the budget, if no plan came at once."""
    if search.pool.best is not None:
        return
    asked = search.task.budget_bytes
    seconds = min(_LIMIT_S, max(_LEAST_LIMIT_S, _LIMIT_SHARE * search.left()))
    seconds = UNLIMITED_S if search.clock.counts_iterations else seconds
    limit, _ = lower_limit(search.task, search.problem, seconds=seconds, enough_bytes=asked)
    if limit > asked:
        search.pool.raise_bound(math.inf, "backward set search")


def _cut_while_cheap(search: Search, loop: CutLoop) -> None:
    """Solve programs with more and more cuts while each is quick: many gaps close so."""
    until = time.perf_counter() + min(_CHEAP_CUTS_S, 0.15 * search.left())
    seconds = min(_FIRST_SOLVE_S, max(0.05, 0.15 * search.left()))
    while not (search.pool.done or loop.finished or loop.build_s > seconds):
        search.report()
        begun = time.perf_counter()
        loop.round(seconds)
        search.repair_seeds()
        if time.perf_counter() > min(until, begun + seconds):
            return


def _plan_with_fewer_ways(search: Search) -> None:
    """Where there are alternatives, start from the plan with stricter alternatives or none.

    Under an iteration limit this is the very plan that the same limit gives with those alone.
    """
    if not search.relaxed.has_choices or search.pool.done:
        return
    share = 1.0 if search.clock.counts_iterations else _FEWER_WAYS_SHARE
    if not search.clock.counts_iterations and _START_S * search.ops > share * search.left():
        return  # the time would go into its first plan
    problem = narrower_problem(search.task, search.problem)
    if problem is None:
        return
    limits = msgspec.structs.replace(search.limits, seconds=share * search.left())
    fewer = Search(search.task, problem, limits, search.progress, time.perf_counter())
    fewer.pool.learn(min(search.pool.known, search.pool.overhead))
    try:
        run_search(fewer)
    finally:
        take_over(search, fewer)


def _search_shortly(search: Search) -> None:
    """Search as long as other methods would take at least; often nothing else is needed."""
    until = time.perf_counter() + min(_SHORT_SEARCH_S, 0.1 * search.left())
    with ThreadPoolExecutor() as threads:
        while not search.pool.done and time.perf_counter() < until:
            search.report()
            search.run([search.next_job() for _ in search.schedules], threads)


def _cut_loops(search: Search, loop: CutLoop) -> list[tuple[CutLoop, float]]:
    """The cut loop for the bound; before it, on large graphs, a cut loop that only gives seeds."""
    loops = [(loop, search.clock.deadline)]
    if worth_restricting(loop):
        seeds = RestrictedLoop(search.relaxed, search.pool, search.limits.solver)
        loops.insert(0, (seeds, time.perf_counter() + _RESTRICTED_SHARE * search.left()))
    return loops
