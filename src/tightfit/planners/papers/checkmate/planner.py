"""The planners on Checkmate's program: exact, warm-started, and rounded.

Rounding has two phases (section 4 of the conference paper). Phase one rounds S: above one half, or
at random with S as the probability. Phase two computes the least R for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from tightfit.plan.plan import Compute, Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.outcomes import NO_PLAN_HERE, Bound, finish, no_plan, simulated
from tightfit.planners.papers.checkmate.program import CheckmateProgram, build_program
from tightfit.planners.papers.checkmate.variables import frontier_stages, split_stages
from tightfit.planners.papers.stages.easy import begin
from tightfit.planners.papers.stages.scale import COST_UNITS, describe, objective_of, overhead_of
from tightfit.planners.papers.stages.schedule import recompute, residency_of, without_waste
from tightfit.planners.papers.stages.staged import (
    Residency,
    Stage,
    Staged,
    staged,
    without_choice,
)
from tightfit.planners.registry import DEFAULT, plan_with
from tightfit.planners.solvers import Solution, SolveOptions, solve, solve_by_rows
from tightfit.planners.solvers.program import Floats
from tightfit.progress import Progress

_SOURCE = "checkmate's program (its own search space)"
_DRAWS = 100
_ROUNDING_SHARE = 0.9  # of the budget for the relaxation that is rounded: rounding uses more
_BORROWED_SHARE = 0.3
_BRANCHING_SHARE = 0.8


def plan_checkmate(task: Task, limits: Limits, progress: Progress, option: str = "") -> Outcome:
    """Solve Checkmate's program, cold: its own relaxation, rounding and bound.

    With ``"split"`` a value may be computed twice before a backward op (section 4.10).
    """
    started, problem, easy = begin(task, limits)
    if easy is not None:
        return easy
    stages = split_stages(problem) if option == "split" else frontier_stages(problem)
    return _Search(task, problem, stages, limits, progress, started).run(None)


def plan_checkmate_plus(task: Task, limits: Limits, progress: Progress) -> Outcome:
    """Solve Checkmate's program from the default planner's plan, its order and its bound.

    The default planner is asked for the same implementations of ops as Checkmate's program has.
    """
    started, problem, easy = begin(task, limits)
    if easy is not None:
        return easy
    share = msgspec.structs.replace(limits, seconds=_BORROWED_SHARE * limits.seconds)
    plain = msgspec.structs.replace(task, graph=without_choice(task.graph, problem))
    lent = plan_with(DEFAULT, plain, share, progress)
    if lent.status == "infeasible":
        return _infeasible(task, lent)
    start = None
    if lent.plan is not None:
        computes = lent.plan.computes
        problem = staged(task, order=list(dict.fromkeys(step.op for step in computes)))
        start = recompute(problem, residency_of(problem, computes))
    search = _Search(task, problem, frontier_stages(problem), limits, progress, started)
    search.borrow_bound(lent)
    return search.run(start)


def _infeasible(task: Task, lent: Outcome) -> Outcome:
    """A borrowed proof: it holds for every plan only if there was nothing to choose from."""
    if all(len(op.alternatives) == 1 for op in task.graph.ops):
        return lent
    return msgspec.structs.replace(lent, status="unknown", bound=0.0, note=NO_PLAN_HERE)


def plan_checkmate_rounding(task: Task, limits: Limits, progress: Progress) -> Outcome:
    """Round Checkmate's relaxation in two phases; its value at the full budget is the bound."""
    started, problem, easy = begin(task, limits)
    if easy is not None:
        return easy
    search = _Search(task, problem, frontier_stages(problem), limits, progress, started)
    capacity = int(_ROUNDING_SHARE * problem.capacity_bytes)
    reserved = msgspec.structs.replace(problem, capacity_bytes=capacity)
    tightened = build_program(reserved, search.stages)
    search.round_relaxation(tightened, search.solve_relaxation(tightened), _DRAWS)
    infeasible = not search.relax(build_program(problem, search.stages))
    return search.outcome(infeasible=infeasible)


class _Search:
    """One exact solve: relaxation, rounding, branch and bound, repair of rounding errors.

    `started`: `time.perf_counter` at the start of planning.
    """

    def __init__(
        self,
        task: Task,
        problem: Staged,
        stages: Sequence[Stage],
        limits: Limits,
        progress: Progress,
        started: float,
    ) -> None:
        self.task = task
        self.problem = problem
        self.stages = stages
        self.limits = limits
        self.progress = progress
        self.started = started
        self.best: list[Compute] | None = None
        self.best_cost_s = math.inf
        self.bound = 0.0
        self.bound_source = _SOURCE

    @property
    def seconds_left(self) -> float:
        return self.limits.seconds - (time.perf_counter() - self.started)

    def borrow_bound(self, lent: Outcome) -> None:
        self.bound, self.bound_source = lent.bound, f"borrowed from {DEFAULT}: {lent.bound_source}"

    def consider(self, computes: list[Compute]) -> int:
        """Keep a schedule if it fits and is the cheapest so far; return its excess in bytes."""
        useful = without_waste(self.problem, computes)
        result = simulated(self.task, useful)
        excess = result.peak_bytes - self.task.budget_bytes
        if excess <= 0 and result.cost_s < self.best_cost_s:
            self.best, self.best_cost_s = useful, result.cost_s
        return excess

    def run(self, start: list[Compute] | None) -> Outcome:
        """Solve, from a schedule if one is given, and return the outcome.

        Without a plan at the end of most of the time, the rest is for rounding the relaxation.
        """
        model = build_program(self.problem, self.stages)
        if start is not None:
            self.consider(start)
        solution = self.branch(model, share=_BRANCHING_SHARE if start is None else 1.0)
        if solution.values is not None:
            excess = self.consider(model.computes(solution.values))
            if excess > 0:
                self.repair(excess)
        infeasible = solution.status == "infeasible"
        if self.best is None and not infeasible:
            infeasible = not self.relax(model)
        return self.outcome(infeasible=infeasible)

    def relax(self, model: CheckmateProgram) -> bool:
        """Solve the relaxation for a bound and round it; False if it proves infeasibility."""
        solution = self.solve_relaxation(model)
        self.raise_bound(solution)
        self.round_relaxation(model, solution, _DRAWS // 10)
        return solution.status != "infeasible"

    def round_relaxation(self, model: CheckmateProgram, solution: Solution, draws: int) -> None:
        """Consider the roundings of a relaxation until time is up."""
        if solution.values is None or any(stage.first is None for stage in self.stages):
            return
        rows = model.residency(solution.values)
        for computes in _rounded(self.problem, rows, draws=draws, seed=self.limits.seed):
            self.consider(computes)
            if self.seconds_left < 0:
                break

    def branch(self, model: CheckmateProgram, *, share: float = 1.0) -> Solution:
        """Branch and bound in this share of the time left, from the best schedule so far."""
        start = None if self.best is None else model.start(self.best)
        solution = solve_by_rows(
            model.program,
            self.options(share),
            model.settled,
            start=start,
            progress=self.progress,
            describe=describe,
        )
        self.raise_bound(solution)
        return solution

    def repair(self, excess_bytes: int) -> None:
        """Solve once more with the capacity lowered: a solution exceeded it by a rounding error."""
        capacity = self.problem.capacity_bytes - excess_bytes
        lowered = msgspec.structs.replace(self.problem, capacity_bytes=capacity)
        model = build_program(lowered, self.stages)
        solution = solve_by_rows(model.program, self.options(), model.settled)
        if solution.values is not None:
            self.consider(model.computes(solution.values))

    def raise_bound(self, solution: Solution) -> None:
        """Take over a better bound of a solver."""
        found = overhead_of(solution.bound)
        if solution.status != "infeasible" and found > self.bound:
            self.bound, self.bound_source = found, _SOURCE

    def solve_relaxation(self, model: CheckmateProgram) -> Solution:
        options = self.options(relax=True)
        return solve(model.program, options, progress=self.progress, describe=describe)

    def options(self, share: float = 1.0, *, relax: bool = False) -> SolveOptions:
        """The rest of the limits, for the solver."""
        return SolveOptions(
            seconds=share * self.seconds_left,
            gap=COST_UNITS * self.limits.gap,
            target=objective_of(self.bound + self.limits.gap),
            nodes=self.limits.iterations,
            seed=self.limits.seed,
            solver=self.limits.solver,
            relax=relax,
        )

    def outcome(self, *, infeasible: bool) -> Outcome:
        """Turn the best schedule and the bound into an outcome."""
        if self.best is not None:
            base_cost_s = self.problem.base_cost_s
            own = self.best_cost_s / base_cost_s - 1.0 if base_cost_s > 0 else 0.0
            bound = min(self.bound, own)
            proven = Bound(bound, self.bound_source)
            gap = self.limits.gap
            return finish(self.task, self.best, bound=proven, started=self.started, gap=gap)
        return no_plan(
            started=self.started,
            proven=False,
            bound=self.bound,
            bound_source=self.bound_source,
            note=NO_PLAN_HERE if infeasible else "",
        )


def _rounded(
    problem: Staged, residency: Floats, *, draws: int, seed: int
) -> Iterator[list[Compute]]:
    """Yield the deterministic rounding of S, then `draws` random ones.

    `residency` (n + 1, values): S of the relaxation.
    """
    yield recompute(problem, _bit_sets(residency > 0.5))
    generator = np.random.default_rng(seed)
    for _ in range(draws):
        yield recompute(problem, _bit_sets(generator.random(residency.shape) < residency))


def _bit_sets(chosen: np.ndarray) -> Residency:
    return [sum(1 << value for value in np.nonzero(row)[0].tolist()) for row in chosen]
