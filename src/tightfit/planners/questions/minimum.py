"""The smallest budget: a proven lower limit, and the smallest one for which a plan is found."""

from __future__ import annotations

import contextlib
import dataclasses
import time

import msgspec

from tightfit._core import _engine
from tightfit.errors import BadInput
from tightfit.graph.ir import Graph, OpId
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan.assemble import keep_everything
from tightfit.plan.plan import Compute, Gradients, Outcome, Plan
from tightfit.planners.anytime.exhaustive import solve_small
from tightfit.planners.base import Limits, Task
from tightfit.planners.engine.build import build_problem
from tightfit.planners.engine.greedy import descend
from tightfit.planners.engine.lower_limit import lower_limit
from tightfit.planners.engine.problem import EngineProblem, computes_of
from tightfit.planners.orders.candidates import MOST_ORDERED, other_orders
from tightfit.planners.orders.only import order_for
from tightfit.planners.orders.reorder import in_traced_order, reorder
from tightfit.planners.outcomes import finish
from tightfit.planners.registry import seeding_planners
from tightfit.progress import SILENT, Progress
from tightfit.units import format_bytes

__all__ = ["MinimumBudget", "minimum_budget"]

_RESOLUTION = 0.002  # of the peak: where the search for a smaller budget ends
_LIMIT_SHARE = 0.3  # of the time for the lower limit
_PIECES_S = (0.4, 1.5, 5.0)  # of search per budget beyond the greedy descent, pass by pass


class MinimumBudget(msgspec.Struct, frozen=True, kw_only=True):
    """How small a budget can be."""

    # Proven: no plan needs less, constants included (docs/search.md, "The least budget", says for
    # which orders of first computations)
    lower_bytes: int
    lower_op: OpId | None  # the op that needs that much, None if the constants do
    settled: bool  # False if time ran out before every op was examined
    found_bytes: int  # the peak of `plan`, the smallest budget for which a plan was found
    plan: Plan  # a verified plan with that peak
    overhead: float  # its overhead, a fraction
    seconds: float  # wall time spent


def minimum_budget(
    graph: Graph,
    gradients: Gradients = "fresh",
    limits: Limits | None = None,
    progress: Progress = SILENT,
) -> MinimumBudget:
    """Find the smallest budget of a graph from both sides (docs/search.md, "The least budget").

    `limits`: of the whole search; by default 10 seconds. `progress`: an interruption ends the
    search with the best so far.
    """
    limits = limits or Limits(seconds=10.0)
    search = _Search(graph, gradients, limits)
    progress.start("smallest budget", at_most_s=limits.seconds)
    try:
        search.find_limits(progress)
        search.descend_by_bisection(progress)
    except KeyboardInterrupt:
        pass
    finally:
        progress.stop()
    return search.result()


class _Order:
    """An order of first computations: the limit proven in it, and the search for schedules."""

    def __init__(self, task: Task, ops: tuple[OpId, ...]) -> None:
        self.ops = ops
        self.task = msgspec.structs.replace(task, graph=reorder(task.graph, ops))
        self.constant_bytes = task.graph.constant_bytes
        self.problem: EngineProblem = build_problem(self.task)
        self.schedule = _engine.Schedule(self.problem.engine, self.problem.budget_bytes)
        self.limit, self.limit_op, self.settled = self.constant_bytes, None, False

    def find_limit(self, seconds: float, progress: Progress) -> None:
        """Raise the proven limit."""
        self.limit, op, self.settled = lower_limit(
            self.task, self.problem, seconds=seconds, progress=progress
        )
        self.limit_op = None if op is None else self.ops[op]

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
            cost = self.problem.baseline_cost
            count = -1 if limits.iterations is None else limits.iterations
            search.improve(min(piece_s, left), count, 1e-4 * cost, 1e-5 * cost, 1 << 60)
            found = self.schedule.fits
        if found:
            peak = self.schedule.peak() + self.constant_bytes
            return peak, in_traced_order(computes_of(self.problem, self.schedule), self.ops)
        left = limits.seconds - (time.perf_counter() - started)
        return self._reach_by_program(task, limits, min(piece_s, left))

    def _reach_by_program(
        self, task: Task, limits: Limits, piece_s: float
    ) -> tuple[int, list[Compute]] | None:
        """On small graphs, let exact methods of others look for a schedule within a budget."""
        if piece_s <= 0:
            return None
        seconds = piece_s if limits.iterations is None else limits.seconds
        limits = msgspec.structs.replace(limits, seconds=seconds, gap=1.0)
        for planner in seeding_planners(self.problem.engine.op_count):
            if not planner.capabilities.exact:
                continue
            with contextlib.suppress(BadInput):  # a step that the method cannot take
                found = self._known(planner.load()(task, limits, SILENT))
                if found is not None:
                    return found
        return None

    def _known(self, outcome: Outcome) -> tuple[int, list[Compute]] | None:
        """The peak and computes of an outcome."""
        if outcome.plan is None:
            return None
        computes = [step for step in outcome.plan.instructions if isinstance(step, Compute)]
        return outcome.peak_bytes, in_traced_order(computes, self.ops)


class _Search:
    """The bracket: a proven limit below, a schedule that fits above."""

    def __init__(self, graph: Graph, gradients: Gradients, limits: Limits) -> None:
        self.started = time.perf_counter()
        self.graph = graph
        self.limits = limits
        self.eager = eager_peak_bytes(graph, gradients=gradients)
        self.task = Task(graph=graph, budget_bytes=self.eager, gradients=gradients)
        self.best = self.eager
        self.computes: list[Compute] = keep_everything(graph)
        self.orders = [_Order(self.task, tuple(range(len(graph.ops))))]

    @property
    def limit(self) -> int:
        """The least limit of the orders: no plan in any of them needs less."""
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

    def descend_by_bisection(self, progress: Progress) -> None:
        """Halve the bracket, in passes with more and more search per budget."""
        step = max(1, int(_RESOLUTION * (self.eager - self.graph.constant_bytes)))
        tries = 0
        for piece_s in _PIECES_S:
            low = self.limit
            while self.best - low > step and self.left() > 0:
                tries += 1
                progress.update(tries, f"smallest budget so far {format_bytes(self.best)}")
                middle = (self.best + low) // 2
                if not self.reach(middle, piece_s, progress):
                    low = middle

    def reach(self, budget_bytes: int, piece_s: float, progress: Progress) -> bool:
        """Look for a schedule within a budget, order by order; keep it if there is one."""
        able = [order for order in self.orders if order.limit <= budget_bytes]
        for order in able:
            limits = msgspec.structs.replace(self.limits, seconds=max(0.05, self.left()))
            found = order.reach(budget_bytes, limits, piece_s / len(able), progress)
            if found is not None:
                self.best, self.computes = found
                self.orders.remove(order)
                self.orders.insert(0, order)  # the first to be asked next time
                return True
        return False

    def result(self) -> MinimumBudget:
        task = msgspec.structs.replace(self.task, budget_bytes=self.best)
        outcome = finish(task, self.computes, started=self.started)
        assert outcome.plan is not None
        lowest = min(self.orders, key=lambda order: order.limit)
        return MinimumBudget(
            lower_bytes=min(self.limit, outcome.peak_bytes),
            lower_op=lowest.limit_op,
            settled=all(order.settled for order in self.orders),
            found_bytes=outcome.peak_bytes,
            plan=outcome.plan,
            overhead=outcome.overhead,
            seconds=time.perf_counter() - self.started,
        )
