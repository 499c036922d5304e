"""The smallest budget: a proven lower limit, and the smallest one for which a plan is found."""

from __future__ import annotations

import time

import msgspec

from tightfit._core import _engine
from tightfit.errors import BadInput
from tightfit.graph.ir import Graph, OpId
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan.assemble import keep_everything
from tightfit.plan.plan import Compute, Gradients, Plan
from tightfit.planners.base import Limits, Task
from tightfit.planners.engine.build import build_problem
from tightfit.planners.engine.greedy import descend
from tightfit.planners.engine.lower_limit import lower_limit
from tightfit.planners.engine.problem import EngineProblem, computes_of
from tightfit.planners.monet.planner import MOST_MONET_OPS, plan_monet
from tightfit.planners.orders.only import MOST_ORDERED, order_for
from tightfit.planners.orders.reorder import reorder
from tightfit.planners.outcomes import finish
from tightfit.progress import SILENT, Progress
from tightfit.units import format_bytes

__all__ = ["MinimumBudget", "minimum_budget"]

_RESOLUTION = 0.002  # of the peak: where the search for a smaller budget ends
_LIMIT_SHARE = 0.3  # of the time for the lower limit
_PIECES_S = (0.4, 1.5, 5.0)  # of search per budget beyond the greedy descent, pass by pass


class MinimumBudget(msgspec.Struct, frozen=True, kw_only=True):
    """How small a budget can be.

    Parameters
    ----------
    lower_bytes : int
        Proven: no plan needs less, constants included (docs/search.md, "The least budget", says
        for which orders of first computations).
    lower_op : int or None
        The op that needs that much, None if the constants do.
    settled : bool
        False if time ran out before every op was examined.
    found_bytes : int
        The peak of `plan`, the smallest budget for which one was found.
    plan : Plan
        A verified plan with that peak.
    overhead : float
        Its overhead, a fraction.
    seconds : float
        Wall time spent.
    """

    lower_bytes: int
    lower_op: OpId | None
    settled: bool
    found_bytes: int
    plan: Plan
    overhead: float
    seconds: float


def minimum_budget(
    graph: Graph,
    gradients: Gradients = "fresh",
    limits: Limits | None = None,
    progress: Progress = SILENT,
) -> MinimumBudget:
    """Find the smallest budget of a graph from both sides (docs/search.md, "The least budget").

    Parameters
    ----------
    graph : Graph
        The step.
    limits : Limits
        Of the whole search; by default 10 seconds.
    progress : Progress
        An interruption ends the search with the best so far.
    """
    limits = limits or Limits(seconds=10.0)
    search = _Search(graph, gradients, limits)
    progress.start("smallest budget", at_most_s=limits.seconds)
    try:
        search.find_limit(progress)
        search.descend_by_bisection(progress)
    except KeyboardInterrupt:
        pass
    finally:
        progress.stop()
    return search.result()


class _Search:
    """The bracket: a proven limit below, a schedule that fits above."""

    def __init__(self, graph: Graph, gradients: Gradients, limits: Limits) -> None:
        self.started = time.perf_counter()
        self.graph = graph
        self.gradients: Gradients = gradients
        self.limits = limits
        self.eager = eager_peak_bytes(graph, gradients=gradients)
        self.best = self.eager
        self.computes: list[Compute] = keep_everything(graph)
        self.limit, self.limit_op, self.settled = graph.constant_bytes, None, False
        task = self.task(self.eager)
        self.problem: EngineProblem = build_problem(task)
        self.schedule = _engine.Schedule(self.problem.engine, self.problem.budget_bytes)

    def task(self, budget_bytes: int) -> Task:
        return Task(graph=self.graph, budget_bytes=budget_bytes, gradients=self.gradients)

    def left(self) -> float:
        return self.limits.seconds - (time.perf_counter() - self.started)

    def find_limit(self, progress: Progress) -> None:
        """Raise the proven limit, for the orders of first computations that are known."""
        task, seconds = self.task(self.eager), _LIMIT_SHARE * self.limits.seconds / 2
        self.limit, self.limit_op, self.settled = lower_limit(
            task, self.problem, seconds=seconds, progress=progress
        )
        if len(self.graph.ops) > MOST_ORDERED:
            return
        least = order_for(self.task(self.limit - 1), self.limits)
        if least.ops == tuple(op.id for op in self.graph.ops):
            return
        other = msgspec.structs.replace(task, graph=reorder(self.graph, least.ops))
        limit, _, settled = lower_limit(
            other, build_problem(other), seconds=seconds, progress=progress
        )
        if limit < self.limit:
            self.limit, self.limit_op, self.settled = limit, None, settled

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
        """Look for a schedule within a budget; keep it if there is one."""
        self.schedule.set_budget(budget_bytes - self.graph.constant_bytes)
        self.schedule.keep_everything()
        limits = msgspec.structs.replace(self.limits, seconds=max(0.05, self.left()))
        found = descend(self.schedule, limits, progress, time.perf_counter())
        if not found and self.left() > 0:
            search = _engine.Search(self.schedule, self.limits.seed, _engine.Settings())
            cost = self.problem.baseline_cost
            seconds = min(piece_s, self.left())
            count = -1 if self.limits.iterations is None else self.limits.iterations
            search.improve(seconds, count, 1e-4 * cost, 1e-5 * cost, 1 << 60)
            found = self.schedule.fits
        if found:
            self.best = self.schedule.peak() + self.graph.constant_bytes
            self.computes = computes_of(self.problem, self.schedule)
        return found or self.reach_by_program(budget_bytes, piece_s)

    def reach_by_program(self, budget_bytes: int, piece_s: float) -> bool:
        """On small graphs, let MONeT's program look for a schedule within a budget."""
        if self.problem.engine.op_count > MOST_MONET_OPS or self.left() <= 0:
            return False
        by_nodes = self.limits.iterations is not None
        seconds = self.limits.seconds if by_nodes else min(piece_s, self.left())
        limits = msgspec.structs.replace(self.limits, seconds=seconds, gap=1.0)
        try:
            outcome = plan_monet(self.task(budget_bytes), limits, SILENT)
        except BadInput:  # a step that the program cannot take
            return False
        if outcome.plan is None:
            return False
        self.best = outcome.peak_bytes
        self.computes = [step for step in outcome.plan.instructions if isinstance(step, Compute)]
        return True

    def result(self) -> MinimumBudget:
        outcome = finish(
            self.task(self.best),
            self.computes,
            started=self.started,
        )
        assert outcome.plan is not None
        return MinimumBudget(
            lower_bytes=min(self.limit, outcome.peak_bytes),
            lower_op=self.limit_op,
            settled=self.settled,
            found_bytes=outcome.peak_bytes,
            plan=outcome.plan,
            overhead=outcome.overhead,
            seconds=time.perf_counter() - self.started,
        )
