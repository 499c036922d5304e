"""The planners on MONeT's program."""

from __future__ import annotations

import time

import msgspec

from tightfit.plan.assemble import keep_everything
from tightfit.plan.plan import Compute, Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.outcomes import NO_PLAN_HERE, Bound, finish, no_plan, simulated
from tightfit.planners.papers.monet.implementations import (
    all_implementations,
    reading_any,
    single_implementations,
)
from tightfit.planners.papers.monet.program import MonetProgram, build_program
from tightfit.planners.papers.monet.variables import LocalBound
from tightfit.planners.papers.stages.easy import begin
from tightfit.planners.papers.stages.scale import COST_UNITS, describe, overhead_of
from tightfit.planners.papers.stages.schedule import without_waste
from tightfit.planners.papers.stages.staged import Staged
from tightfit.planners.solvers import Solution, SolveOptions, solve_by_rows
from tightfit.progress import Progress

_SOURCE = "monet's program (its own search space)"


def plan_monet(task: Task, limits: Limits, progress: Progress, option: str = "tight") -> Outcome:
    """Solve MONeT's program with one implementation per op (MONeT-NoOp).

    With ``"loose"`` local memory has the looser bound (appendix B, first).
    """
    local_bound: LocalBound = "loose" if option == "loose" else "tight"
    started, problem, easy = begin(task, limits)
    if easy is not None:
        return easy
    model = build_program(problem, single_implementations(problem), local_bound)
    solution = _solve(model, limits, progress, started)
    infeasible = solution.status == "infeasible"
    bound = 0.0 if infeasible else overhead_of(solution.bound)
    computes, excess = _fitting(task, problem, model, solution)
    if computes is None and excess > 0:
        capacity = problem.capacity_bytes - excess
        lowered = msgspec.structs.replace(problem, capacity_bytes=capacity)
        model = build_program(lowered, single_implementations(lowered), local_bound)
        again = _solve(model, limits, progress, started)
        computes, _ = _fitting(task, problem, model, again)
    return _outcome(task, computes, bound, limits, started, infeasible=infeasible)


def plan_monet_all(task: Task, limits: Limits, progress: Progress) -> Outcome:
    """Solve MONeT's program: which nodes to recompute, and how (section 4)."""
    started, problem, easy = begin(task, limits)
    if easy is not None and easy.plan is None:
        return easy
    if problem.capacity_bytes <= 0:  # no value takes room
        return finish(task, keep_everything(task.graph), started=started, gap=limits.gap)
    ways = all_implementations(task.graph, problem)
    model = build_program(reading_any(problem, ways), ways)
    solution = _solve(model, limits, progress, started)
    infeasible = solution.status == "infeasible"
    bound = -1.0 if infeasible else solution.bound / COST_UNITS - 1.0
    computes = None
    if solution.values is not None:
        computes = model.computes(model.settled(solution.values))
    if computes is None and easy is not None:
        return finish(task, keep_everything(task.graph), started=started, gap=limits.gap)
    if computes is not None and simulated(task, computes).peak_bytes > task.budget_bytes:
        computes = None
    return _outcome(task, computes, bound, limits, started, infeasible=infeasible)


def _outcome(
    task: Task,
    computes: list[Compute] | None,
    bound: float,
    limits: Limits,
    started: float,
    *,
    infeasible: bool,
) -> Outcome:
    """Return the outcome of a schedule that fits, or of a program without a solution that does."""
    if computes is not None:
        return finish(task, computes, bound=Bound(bound, _SOURCE), started=started, gap=limits.gap)
    note = NO_PLAN_HERE if infeasible else ""
    return no_plan(started=started, proven=False, bound=bound, bound_source=_SOURCE, note=note)


def _solve(model: MonetProgram, limits: Limits, progress: Progress, started: float) -> Solution:
    options = SolveOptions(
        seconds=limits.seconds - (time.perf_counter() - started),
        gap=COST_UNITS * limits.gap,
        nodes=limits.iterations,
        seed=limits.seed,
        solver=limits.solver,
    )
    return solve_by_rows(
        model.program, options, model.settled, progress=progress, describe=describe
    )


def _fitting(
    task: Task, problem: Staged, model: MonetProgram, solution: Solution
) -> tuple[list[Compute] | None, int]:
    """The schedule of a solution if it fits, and else the bytes it exceeds the budget by."""
    if solution.values is None:
        return None, 0
    computes = without_waste(problem, model.computes(solution.values))
    excess = simulated(task, computes).peak_bytes - task.budget_bytes
    return (computes if excess <= 0 else None), excess
