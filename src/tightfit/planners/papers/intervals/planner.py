"""Retention intervals on a constraint solver: Moccasin (Bartan et al., ICML 2023).

Every value is retained during at most two intervals, or more where two do not fit, on a grid of
events, one event per (stage, node). Memory is one cumulative constraint. The model is in `model`;
OR-Tools runs in a child process, since it cannot share one with every version of HiGHS.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import time

import msgspec

from tightfit.errors import MissingExtra
from tightfit.plan.plan import Compute, Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.child import run_in_child
from tightfit.planners.outcomes import NO_PLAN_HERE, Bound, finish, no_plan, simulated
from tightfit.planners.papers.stages.easy import begin
from tightfit.planners.papers.stages.schedule import without_waste
from tightfit.planners.papers.stages.staged import Staged
from tightfit.progress import Progress, shown

_SOURCE = "retention intervals (their own search space)"


class IntervalTask(msgspec.Struct, frozen=True, kw_only=True):
    problem: Staged
    limits: Limits


class IntervalReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of the child process: a schedule, a bound (a fraction), a final status."""

    status: str
    computes: tuple[Compute, ...] = ()
    bound: float = 0.0


def plan_intervals(task: Task, limits: Limits, progress: Progress) -> Outcome:
    """Minimise recomputation over retention intervals with CP-SAT.

    Raises `MissingExtra` if OR-Tools is not installed.
    """
    if importlib.util.find_spec("ortools") is None:
        raise MissingExtra("planner 'intervals' needs ortools: pip install tightfit[cpsat]")
    started, problem, easy = begin(task, limits)
    if easy is not None:
        return easy
    best = _Best(task, problem, progress)
    left = limits.seconds - (time.perf_counter() - started)
    own = msgspec.structs.replace(limits, seconds=left)
    request = IntervalTask(problem=problem, limits=own)
    with (
        contextlib.suppress(KeyboardInterrupt),
        shown(progress, f"retention intervals: {len(problem.nodes)} ops", at_most_s=left),
    ):
        run_in_child(
            "tightfit.planners.papers.intervals.model:serve",
            msgspec.msgpack.encode(request),
            seconds=left * 1.1 + 1.0,
            on_report=best.receive,
        )
    return best.outcome(limits, started)


class _Best:
    """The cheapest schedule that fits among those the child reported, and the best bound."""

    def __init__(self, task: Task, problem: Staged, progress: Progress) -> None:
        self.task = task
        self.problem = problem
        self.progress = progress
        self.reports = 0
        self.computes: list[Compute] | None = None
        self.cost_s = math.inf
        self.bound = 0.0
        self.infeasible = False

    def receive(self, data: bytes) -> None:
        """Take in one report; may raise KeyboardInterrupt."""
        self.reports += 1
        if data:
            report = msgspec.msgpack.decode(data, type=IntervalReport)
            self.bound = max(self.bound, report.bound)
            self.infeasible = report.status == "infeasible"
            if report.computes:
                useful = without_waste(self.problem, report.computes)
                result = simulated(self.task, useful)
                if result.peak_bytes <= self.task.budget_bytes and result.cost_s < self.cost_s:
                    self.computes, self.cost_s = useful, result.cost_s
        self.progress.update(self.reports, f"bound {self.bound:.4f}")

    def outcome(self, limits: Limits, started: float) -> Outcome:
        """Turn the best schedule and bound into an outcome."""
        if self.computes is None:
            return no_plan(
                started=started,
                proven=False,
                bound=self.bound,
                bound_source=_SOURCE,
                note=NO_PLAN_HERE if self.infeasible else "",
            )
        base = self.problem.base_cost_s
        overhead = self.cost_s / base - 1.0 if base > 0 else 0.0
        bound = Bound(min(self.bound, overhead), _SOURCE)
        return finish(self.task, self.computes, bound=bound, started=started, gap=limits.gap)
