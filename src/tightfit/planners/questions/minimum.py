"""The smallest budget: a proven lower limit, and the smallest budget for which a plan is found."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Hashable, Sequence

import msgspec

from tightfit._core import _engine
from tightfit.errors import BadInput
from tightfit.graph.ir import Graph, OpId
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan.assemble import keep_everything
from tightfit.plan.plan import Compute, Gradients, Outcome, Plan
from tightfit.planners.anytime.borrow import borrowed_ranges
from tightfit.planners.anytime.exhaustive import solve_small
from tightfit.planners.anytime.pool import PooledSchedule
from tightfit.planners.base import Limits, Task
from tightfit.planners.engine.build import build_problem
from tightfit.planners.engine.greedy import descend
from tightfit.planners.engine.lower_limit import lower_limit
from tightfit.planners.engine.problem import EngineProblem, computes_of
from tightfit.planners.orders.others import MOST_ORDERED, order_for, other_orders
from tightfit.planners.orders.reorder import in_traced_order, reorder
from tightfit.planners.outcomes import finish
from tightfit.planners.registry import seeding_planners
from tightfit.progress import SILENT, Progress, shown
from tightfit.units import format_bytes

_RESOLUTION = 0.002  # of the peak: where the search for a smaller budget ends
_LIMIT_SHARE = 0.3  # of the time for the lower limit
_BISECT_S = 0.05  # of search per budget beyond the greedy descent, while the bracket is halved
_LEAST_TRIES = 6  # however short the time: on a busy machine it is
_PIECE_S = 0.25  # of search at a time, in small steps
_GAP_SHARE = 0.03  # of the gap between the best budget and the limit: how far it is lowered at once
# A search ends after so long without a smaller budget
_PATIENCE_SHARE = 0.3  # of the time for all
_PATIENCE_OP_S = 0.01  # for each op, and for 25 at least
_PROGRAM_S = 1.5  # for exact methods of others, at least, where so much is left
_PATIENCE_TRIES = 4  # with a number of iterations instead of a time


@dataclasses.dataclass(frozen=True)
class FoundSchedule:
    """The schedule of the least budget found; searches of steps alike may begin from it."""

    shape: Hashable  # equal for all steps whose schedules may be loaded for each other
    schedule: PooledSchedule
    searched_s: float  # the limit of the search


class MinimumBudget(msgspec.Struct, frozen=True, kw_only=True):
    """How small a budget can be."""

    # Proven: no plan needs less, constants included (docs/search.md, "The least budget", says for
    # which orders of first computations)
    lower_bytes: int
    settled: bool  # False if time ran out before every op was examined
    found_bytes: int  # the peak of `plan`, the smallest budget for which a plan was found
    plan: Plan  # a verified plan with that peak
    overhead: float  # its overhead, a fraction
    seconds: float  # wall time spent
    schedule: FoundSchedule | None  # that of the plan, None if the engine cannot hold it


def minimum_budget(
    graph: Graph,
    gradients: Gradients = "fresh",
    limits: Limits | None = None,
    progress: Progress = SILENT,
    earlier: Sequence[FoundSchedule] = (),
    asked_bytes: int | None = None,
) -> MinimumBudget:
    """Find the smallest budget of a graph from both sides (docs/search.md, "The least budget").

    `limits`: of the whole search; by default 10 seconds. `progress`: an interruption ends the
    search with the best so far. `earlier`: schedules of steps of the same shape; after a search
    that was as long, only the best of these is lowered. `asked_bytes`: the search ends once it is
    known whether this budget has a plan; None: it ends with the smallest.
    """
    limits = limits or Limits(seconds=10.0)
    search = _Search(graph, gradients, limits, asked_bytes)
    with (
        contextlib.suppress(KeyboardInterrupt),
        shown(progress, "smallest budget", at_most_s=limits.seconds),
    ):
        search.find_limits(progress)
        if search.begin_from(earlier) >= limits.seconds:
            search.lower_best(progress)
        else:
            search.bisect(progress)
            search.lower_step_by_step(progress)
    return search.result()


def proven_least_bytes(graph: Graph, gradients: Gradients, limits: Limits) -> int:
    """Return bytes that are proven to be needed by every plan of a graph."""
    search = _Search(graph, gradients, limits)
    search.find_limits(SILENT)
    return search.limit


class _Patience:
    """How long a search goes on without a smaller budget."""

    def __init__(self, limits: Limits, wait_s: float, left_s: float) -> None:
        self._wait_s = wait_s
        self._most_tries = None if limits.iterations is None else _PATIENCE_TRIES
        self._ends = time.perf_counter() + left_s
        self._last_gain = time.perf_counter()
        self._tries = 0

    @property
    def piece_s(self) -> float:
        """The time of one try; a number of iterations ends it sooner."""
        left_s = self._ends - time.perf_counter()
        return left_s if self._most_tries else min(_PIECE_S, left_s)

    @property
    def over(self) -> bool:
        now = time.perf_counter()
        if self._most_tries:
            return self._tries >= self._most_tries or now > self._ends
        return now - self._last_gain > self._wait_s or now > self._ends

    def note(self, gained: bool) -> None:
        self._tries = 0 if gained else self._tries + 1
        if gained:
            self._last_gain = time.perf_counter()


class _Order:
    """An order of first computations: the limit proven in it, and the search for schedules."""

    def __init__(self, task: Task, ops: tuple[OpId, ...]) -> None:
        self.ops = ops
        self.task = msgspec.structs.replace(task, graph=reorder(task.graph, ops))
        self.constant_bytes = task.graph.constant_bytes
        self.problem: EngineProblem = build_problem(self.task)
        self.schedule = _engine.Schedule(self.problem.engine, self.problem.budget_bytes)
        self.limit, self.settled = self.constant_bytes, False
        self.found: PooledSchedule | None = None  # the last that fitted the budget asked for

    def find_limit(self, seconds: float, progress: Progress) -> None:
        self.limit, self.settled = lower_limit(
            self.task, self.problem, seconds=seconds, progress=progress
        )

    @property
    def shape(self) -> Hashable:
        """Equal for two problems whose schedules may be loaded for each other."""
        ways = tuple(len(alternatives) for alternatives in self.problem.alternatives)
        return self.ops, len(self.problem.sizes), ways

    def peak_of(self, found: FoundSchedule) -> int:
        """Return the peak of the schedule of another problem of the same shape."""
        found.schedule.load(self.schedule)
        return self.schedule.peak() + self.constant_bytes

    def begin_from(self, found: FoundSchedule) -> tuple[int, list[Compute]]:
        """Take the schedule of another problem of the same shape; return its peak and computes."""
        self.schedule.set_budget(self.problem.budget_bytes)
        found.schedule.load(self.schedule)
        return self._kept()

    def reach(
        self, budget_bytes: int, limits: Limits, piece_s: float, progress: Progress
    ) -> tuple[int, list[Compute]] | None:
        """Look for a schedule within a budget; return its peak and computes."""
        started = time.perf_counter()
        task = msgspec.structs.replace(self.task, budget_bytes=budget_bytes)
        own = dataclasses.replace(self.problem, budget_bytes=budget_bytes - self.constant_bytes)
        small = solve_small(task, own, limits, started)
        if small is not None:
            return self._known(small)
        self.schedule.set_budget(own.budget_bytes)
        self.schedule.keep_everything()
        found = descend(self.schedule, limits, progress, started)
        left = limits.seconds - (time.perf_counter() - started)
        if not found and left > 0:
            search = _engine.Search(self.schedule, limits.seed, _engine.Settings())
            self._improve(search, limits, min(piece_s, left))
        return self._kept() if self.schedule.fits else None

    def lowered(
        self, limits: Limits, least_step: int, patience: _Patience, enough_bytes: int
    ) -> tuple[int, list[Compute]] | None:
        """Lower the last schedule found in small steps; return the peak and computes reached.

        `enough_bytes`: a peak that need not be lowered.
        """
        if self.found is None:
            return None
        self.found.load(self.schedule)
        search = _engine.Search(self.schedule, limits.seed, _engine.Settings())
        best, peak, limit = None, self.schedule.peak(), self.limit - self.constant_bytes
        limit = max(limit, enough_bytes - self.constant_bytes - least_step)
        while peak - limit > least_step and not patience.over:
            step = max(least_step, int(_GAP_SHARE * (peak - limit)))
            self.schedule.set_budget(peak - step)
            self._improve(search, limits, patience.piece_s)
            patience.note(self.schedule.fits)
            if self.schedule.fits:
                peak, best = self.schedule.peak(), self._kept()
        return best

    def _improve(self, search: _engine.Search, limits: Limits, seconds: float) -> None:
        """Search until the schedule fits its budget."""
        cost = self.problem.baseline_cost
        count = -1 if limits.iterations is None else limits.iterations
        search.improve(seconds, count, 1e-4 * cost, 1e-5 * cost, 1 << 60)

    def _kept(self) -> tuple[int, list[Compute]]:
        """Keep the schedule as the last found; return its peak and computes."""
        self.found = PooledSchedule.of(self.schedule)
        peak = self.schedule.peak() + self.constant_bytes
        return peak, in_traced_order(computes_of(self.problem, self.schedule.computes()), self.ops)

    def reach_by_program(
        self, budget_bytes: int, limits: Limits, piece_s: float
    ) -> tuple[int, list[Compute]] | None:
        """On small graphs, let exact methods of others look for a schedule within a budget."""
        task = msgspec.structs.replace(self.task, budget_bytes=budget_bytes)
        seconds = piece_s if limits.iterations is None else limits.seconds
        limits = msgspec.structs.replace(limits, seconds=seconds, gap=1.0)
        for planner in seeding_planners(self.problem.engine.op_count):
            if not planner.exact:
                continue
            with contextlib.suppress(BadInput):  # a step that the method cannot take
                found = self._known(planner.load()(task, limits, SILENT))
                if found is not None:
                    return found
        return None

    def _known(self, outcome: Outcome) -> tuple[int, list[Compute]] | None:
        """The peak and computes of an outcome; its schedule is kept if the engine can hold it."""
        if outcome.plan is None:
            return None
        computes = outcome.plan.computes
        self.schedule.keep_everything()
        self.schedule.load_ranges(borrowed_ranges(self.problem, self.task.graph, computes))
        if self.schedule.peak() + self.constant_bytes <= outcome.peak_bytes:
            return self._kept()
        return outcome.peak_bytes, in_traced_order(computes, self.ops)


class _Search:
    """The bracket: a proven limit below, a schedule that fits above."""

    def __init__(
        self, graph: Graph, gradients: Gradients, limits: Limits, asked_bytes: int | None = None
    ) -> None:
        self.started = time.perf_counter()
        self.graph = graph
        self.limits = limits
        self.asked_bytes = asked_bytes
        self.begun_s = 0.0  # the limit of an earlier search from whose schedule this begins
        self.eager = eager_peak_bytes(graph, gradients=gradients)
        self.task = Task(graph=graph, budget_bytes=self.eager, gradients=gradients)
        self.best = self.eager
        self.computes: list[Compute] = keep_everything(graph)
        self.orders = [_Order(self.task, tuple(range(len(graph.ops))))]

    @property
    def limit(self) -> int:
        """The least limit of the orders: no plan in any order needs less."""
        return min(order.limit for order in self.orders)

    def left(self) -> float:
        return self.limits.seconds - (time.perf_counter() - self.started)

    def find_limits(self, progress: Progress) -> None:
        """Raise the proven limit of each order that plans may take."""
        traced, seconds = self.orders[0], _LIMIT_SHARE * self.limits.seconds / 2
        traced.find_limit(seconds, progress)
        spent = self.limits.seconds - self.left()
        if len(self.graph.ops) > MOST_ORDERED or self.left() < spent:  # as another order takes
            return
        task = msgspec.structs.replace(self.task, budget_bytes=traced.limit - 1)
        others = other_orders(self.graph, order_for(task, self.limits))
        self.orders += [_Order(self.task, ops) for ops in others]
        for order in self.orders[1:]:
            order.find_limit(seconds / len(others), progress)

    @property
    def is_over(self) -> bool:
        """Whether the answer is known well enough."""
        asked_bytes = self.asked_bytes
        if asked_bytes is not None and not self.limit <= asked_bytes < self.best:
            return True
        return self.best - self.limit <= self.least_step

    @property
    def least_step(self) -> int:
        return max(1, int(_RESOLUTION * (self.eager - self.graph.constant_bytes)))

    def bisect(self, progress: Progress) -> None:
        """Halve the bracket."""
        low, tries = self.limit, 0
        while (
            not self.is_over
            and self.best - low > self.least_step
            and (self.left() > 0 or tries < _LEAST_TRIES)
        ):
            tries += 1
            progress.update(tries, f"smallest budget so far {format_bytes(self.best)}")
            middle = (self.best + low) // 2
            if not self.reach(middle, _BISECT_S, progress):
                low = middle

    def begin_from(self, earlier: Sequence[FoundSchedule]) -> float:
        """Begin from the best schedule of earlier searches; return their seconds, 0: of none."""
        for order in tuple(self.orders):
            shape = order.shape
            alike = [each for each in earlier if each.shape == shape]
            best = min(alike, key=order.peak_of, default=None)
            if best is not None and order.peak_of(best) < self.best:
                self.begun_s = best.searched_s
                self._keep(order, order.begin_from(best))
        return self.begun_s

    def lower_step_by_step(self, progress: Progress) -> None:
        """Go on from the best schedule, order by order, until none smaller comes for long."""
        while not self.is_over and self.left() > 0:
            self.lower_best(progress)
            if self.is_over or self.left() <= 0:
                return
            smaller, wait_s = self.best - self.least_step, self.wait_s
            if not (
                self.reach_by_program(smaller, wait_s) or self.reach(smaller, wait_s, progress)
            ):
                return

    @property
    def wait_s(self) -> float:
        """The time after which a search without a smaller budget ends."""
        of_ops_s = _PATIENCE_OP_S * max(25, len(self.graph.ops))
        return min(_PATIENCE_SHARE * self.limits.seconds, of_ops_s)

    def lower_best(self, progress: Progress) -> None:
        """Go on from the best schedule in small steps."""
        if self.is_over:
            return
        progress.update(0, f"smallest budget so far {format_bytes(self.best)}")
        patience = _Patience(self.limits, self.wait_s, self.left())
        found = self.orders[0].lowered(
            self.limits, self.least_step, patience, self.asked_bytes or 0
        )
        if found is not None and found[0] < self.best:
            self.best, self.computes = found

    def reach(self, budget_bytes: int, piece_s: float, progress: Progress) -> bool:
        """Look for a schedule within a budget, order by order; keep it if there is any."""
        able = self._able(budget_bytes)
        for order in able:
            limits = msgspec.structs.replace(self.limits, seconds=max(0.05, self.left()))
            found = order.reach(budget_bytes, limits, piece_s / len(able), progress)
            if found is not None:
                return self._keep(order, found)
        return False

    def reach_by_program(self, budget_bytes: int, wait_s: float) -> bool:
        """The same by exact methods of others."""
        for order in self._able(budget_bytes):
            piece_s = min(max(wait_s, _PROGRAM_S), self.left())
            found = order.reach_by_program(budget_bytes, self.limits, piece_s)
            if found is not None:
                return self._keep(order, found)
        return False

    def _able(self, budget_bytes: int) -> list[_Order]:
        """The orders for which it is not proven that no plan fits a budget."""
        return [order for order in self.orders if order.limit <= budget_bytes]

    def _keep(self, order: _Order, found: tuple[int, list[Compute]]) -> bool:
        """Keep a schedule; its order is the first to be asked next time."""
        self.best, self.computes = found
        self.orders.remove(order)
        self.orders.insert(0, order)
        return True

    def result(self) -> MinimumBudget:
        task = msgspec.structs.replace(self.task, budget_bytes=self.best)
        outcome = finish(task, self.computes, started=self.started)
        assert outcome.plan is not None
        best = self.orders[0]
        schedule = None
        if best.found is not None:
            own_s = self.limits.seconds if self.asked_bytes is None else 0.0
            schedule = FoundSchedule(best.shape, best.found, max(own_s, self.begun_s))
        return MinimumBudget(
            lower_bytes=min(self.limit, outcome.peak_bytes),
            settled=all(order.settled for order in self.orders),
            found_bytes=outcome.peak_bytes,
            plan=outcome.plan,
            overhead=outcome.overhead,
            seconds=time.perf_counter() - self.started,
            schedule=schedule,
        )
