"""The default planner where there is far memory: first without it, then with moves as well."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tightfit.graph.ir import OpId
from tightfit.plan.plan import Compute, Outcome
from tightfit.planners.anytime.clock import Clock
from tightfit.planners.anytime.planner import AnytimeResult, plan_anytime, run_anytime
from tightfit.planners.anytime.pool import PooledSchedule
from tightfit.planners.base import Limits, Task
from tightfit.planners.bounds import least_overhead
from tightfit.planners.moves.bound import MovesBound
from tightfit.planners.moves.evaluate import MovesEvaluator
from tightfit.planners.moves.search import MovesSearch
from tightfit.planners.orders.reorder import in_traced_order, reorder
from tightfit.planners.outcomes import Bound, finish, no_plan
from tightfit.progress import Interrupts, Progress, shown

_FIRST_SHARE = 0.1  # of the time, for a first plan without moves
_PLAIN_SHARE = 0.35  # of the time, for the plan without moves once there is a first


def plan_with_moves(task: Task, limits: Limits, progress: Progress) -> Outcome:
    """Plan without far memory, and where there is some and it may help, with it.

    The plan is never worse than the plan that the search finds without moves in its share of the
    limits. The bound holds for plans with moves in the order of first computations of that plan.
    """
    if task.far is None:
        return plan_anytime(task, limits, progress)
    started = time.perf_counter()
    with Interrupts() as interrupts:
        near = _Near(task, limits, progress, started)
        plain = near.plan()
        least = least_overhead(task.graph)
        at_its_best = plain.plan is not None and plain.overhead - least <= limits.gap
        if at_its_best or plain.bound_source == "working set" or interrupts.seen:
            return plain
        order = _order_of(plain, len(task.graph.ops))
        left = near.left_s() if plain.plan is not None else (1.0 - _PLAIN_SHARE) * limits.seconds
        moving = _Moving(task, limits, progress, started, plain)
        outcome = moving.run(order, interrupts, left)
        is_open = outcome.plan is None and outcome.status != "infeasible"
        if is_open and near.counts_seconds and not interrupts.seen:
            late = near.plan_late()
            return late if late.plan is not None else outcome
        return outcome


class _Near:
    """The search without far memory, in up to two pieces.

    Where no plan is found soon, recomputing alone hardly does it: moves are searched first then.
    """

    def __init__(self, task: Task, limits: Limits, progress: Progress, started: float) -> None:
        self.task = msgspec.structs.replace(task, far=None)
        self.limits = limits
        self.progress = progress
        self.started = started

    @property
    def counts_seconds(self) -> bool:
        """Whether the search may be cut by time: a search that counts iterations is run once."""
        return self.limits.iterations is None

    def left_s(self) -> float:
        """Seconds left of all limits."""
        return self.limits.seconds - (time.perf_counter() - self.started)

    def plan(self) -> Outcome:
        """The plan that is found in this search's share; without a first plan, soon none."""
        if not self.counts_seconds:
            return self._run(_PLAIN_SHARE * self.limits.seconds).outcome
        first = self._run(_FIRST_SHARE * self.limits.seconds)
        if first.outcome.plan is None or first.outcome.status == "optimal":
            return first.outcome
        seconds = self.left_s() - (1.0 - _PLAIN_SHARE) * self.limits.seconds
        later = self._run(seconds, first.schedules).outcome
        return min(first.outcome, later, key=lambda outcome: outcome.overhead)

    def plan_late(self) -> Outcome:
        """The plan that is found in the time that is left."""
        return self._run(max(0.05, self.left_s())).outcome

    def _run(self, seconds: float, seeds: Sequence[PooledSchedule] = ()) -> AnytimeResult:
        own = msgspec.structs.replace(self.limits, seconds=seconds)
        return run_anytime(self.task, own, self.progress, seeds=seeds)


def _order_of(outcome: Outcome, ops: int) -> tuple[OpId, ...]:
    """The order of first computations of a plan, of all ops; the traced order without a plan."""
    steps = () if outcome.plan is None else outcome.plan.computes
    computed = dict.fromkeys(step.op for step in steps)
    if len(computed) < ops:
        return tuple(range(ops))  # optional ops without readers have no place in the plan
    return tuple(computed)


@dataclass(frozen=True)
class _Moving:
    """The search for moves after the search without, and the results of both."""

    task: Task
    limits: Limits
    progress: Progress
    started: float
    plain: Outcome

    def run(self, order: tuple[OpId, ...], interrupts: Interrupts, left_s: float) -> Outcome:
        """Search in an order of first computations; an interruption leaves the best so far."""
        traced = order == tuple(range(len(order)))
        graph = self.task.graph if traced else reorder(self.task.graph, order)
        task = msgspec.structs.replace(self.task, graph=graph)
        seconds = max(0.1, left_s)
        clock = Clock(msgspec.structs.replace(self.limits, seconds=seconds), time.perf_counter())
        search = None
        with (
            contextlib.suppress(KeyboardInterrupt),
            shown(self.progress, "moves to far memory", at_most_s=seconds),
        ):
            bound = MovesBound(task, self.limits.solver)
            evaluator = MovesEvaluator(task)
            search = MovesSearch(
                evaluator, bound, clock, self.progress, self.plain.overhead, interrupts
            )
            search.run(self._in_order(order) if self.plain.plan is not None else None)
        if search is None:
            return self.plain
        note = "" if traced else "bound in the order of the plan"
        return self._outcome(search, order, note)

    def _in_order(self, order: tuple[OpId, ...]) -> list[Compute]:
        """The computes of the plan without moves, in the ids of an order."""
        assert self.plain.plan is not None
        place = {op: position for position, op in enumerate(order)}
        return [
            msgspec.structs.replace(step, op=place[step.op]) for step in self.plain.plan.computes
        ]

    def _outcome(self, search: MovesSearch, order: tuple[OpId, ...], note: str) -> Outcome:
        bound = search.bound
        best = search.best
        if best is not None and best.result.overhead < self.plain.overhead:
            steps = in_traced_order(best.steps, order)
        elif self.plain.plan is not None:
            steps = self.plain.plan.computes
        else:
            return no_plan(
                started=self.started,
                proven=bound.infeasible,
                bound=bound.overhead,
                bound_source=bound.source,
                note=note,
            )
        proven, gap = Bound(bound.overhead, bound.source), self.limits.gap
        return finish(self.task, steps, bound=proven, started=self.started, gap=gap, note=note)
