"""Schedules to start from: greedy descents, searches with fewer ways, programs, other methods.

See docs/search.md, "Plans of other methods" and "Chains".
"""

from __future__ import annotations

import contextlib
import math
import time

import msgspec

from tightfit.errors import BadInput
from tightfit.plan.plan import Outcome
from tightfit.planners.anytime.borrow import borrowed_ranges
from tightfit.planners.anytime.bound import CutLoop
from tightfit.planners.anytime.chain import SWEEP, Split
from tightfit.planners.anytime.keep import KeepLists
from tightfit.planners.anytime.pool import PooledSchedule
from tightfit.planners.anytime.search import Search
from tightfit.planners.anytime.segments import ChainSplitter
from tightfit.planners.engine.greedy import descend
from tightfit.planners.engine.narrower import choices_in
from tightfit.planners.registry import seeding_planners
from tightfit.progress import SILENT

UNLIMITED_S = 1e4  # where nodes or iterations are the limit
NODES = 2000  # branch-and-bound nodes per program under an iteration limit

_DESCENT_S = 2.0
_MARGIN_S = 1.0
_MARGINS = (0.02, 0.05, 0.1)
_LEAST_CHAIN_OPS = 600
_CHAIN_SHARE = 0.25  # of the time for seeds from recursive checkpointing
_CHAIN_TRIES = 5  # after which they have to be near the best plan
_BORROWED_SHARE = 0.2  # of the time for the plan of another method
_CHAIN_BEHIND = 0.02  # how near, as a difference of overheads


def add_greedy_plan(search: Search) -> None:
    """Descend greedily, several times at random if the first descent gets stuck."""
    schedule = search.schedules[0]
    seconds = (
        UNLIMITED_S if search.clock.counts_iterations else min(_DESCENT_S, search.limits.seconds)
    )
    limits = msgspec.structs.replace(search.limits, seconds=seconds)
    if descend(schedule, limits, search.progress, time.perf_counter()):
        search.add([PooledSchedule.of(schedule)])


def take_over(search: Search, fewer: Search) -> None:
    """Add the best plan of a search with fewer ways."""
    best = fewer.pool.best
    if best is None:
        return
    choices = choices_in(search.problem, fewer.problem, best.first_choices)
    if choices is not None:
        schedule = search.schedules[0]
        schedule.load(best.ranges, choices, [-1] * search.ops)
        search.add([PooledSchedule.of(schedule)])


def seed_with_margins(search: Search, loop: CutLoop, nodes: int | None = None) -> None:
    """With alternatives, programs that leave room give seeds that need less repair."""
    for margin in _MARGINS if search.relaxed.has_choices else ():
        if not search.pool.done and search.left() > 1.0:
            seconds = min(_MARGIN_S, 0.1 * search.left())
            loop.seed(margin, seconds if nodes is None else UNLIMITED_S, nodes)
            search.repair_seeds()


def seed_with_others(search: Search) -> None:
    """Start also from the plans of the methods that the registry marks as seeds."""
    if search.relaxed.has_choices:
        return
    by_nodes = search.clock.counts_iterations
    for planner in seeding_planners(search.ops):
        if search.pool.done or not (by_nodes or search.left() > 0.2):
            return
        search.report()
        seconds = UNLIMITED_S if by_nodes else _BORROWED_SHARE * search.left()
        limits = msgspec.structs.replace(
            search.limits, seconds=seconds, iterations=NODES if by_nodes else None
        )
        with contextlib.suppress(BadInput):  # a step that the method says it cannot take
            _borrow(search, planner.load()(search.task, limits, SILENT))


def _borrow(search: Search, outcome: Outcome) -> None:
    """Repair and polish the plan of another method."""
    if outcome.plan is None:
        return
    _repair(search, borrowed_ranges(search.problem, search.task.graph, outcome.plan.computes))


def _repair(search: Search, ranges: list[tuple[int, int, int]]) -> None:
    """Bring a schedule with this residency, and no choice among ways, below the budget."""
    schedule = search.schedules[0]
    schedule.keep_everything()
    schedule.load_ranges(ranges)
    search.repair(PooledSchedule.of(schedule))


def seed_with_chains(search: Search) -> None:
    """On large graphs, schedules of recursive checkpointing, repaired; unless they are bad."""
    forward = _forward_ops(search)
    if search.ops < _LEAST_CHAIN_OPS or not 1 < forward < search.ops:
        return
    until = (1.0 - _CHAIN_SHARE) * search.left()
    splitter = ChainSplitter(search.relaxed, forward)
    keep_lists = KeepLists(splitter)
    splits: dict[int, Split] = {}
    best = math.inf
    for tried, (most, optimism) in enumerate(SWEEP):
        limited = search.clock.counts_iterations
        if search.pool.done or (tried >= _CHAIN_TRIES if limited else search.left() < until):
            return
        if tried >= _CHAIN_TRIES and best > search.pool.overhead + _CHAIN_BEHIND:
            return
        search.report()
        if most not in splits:
            splits[most] = Split(splitter, keep_lists, most)
        ranges = splits[most].ranges(optimism * search.problem.budget_bytes)
        if ranges is None:
            continue
        _repair(search, ranges)
        best = min(best, search.last_overhead)


def _forward_ops(search: Search) -> int:
    """How many of the engine's ops come before the first op of a backward segment."""
    graph = search.task.graph
    for position, op in enumerate(search.problem.graph_ops):
        if op >= 0 and graph.segments[graph.ops[op].segment].phase == "backward":
            return position
    return search.ops
