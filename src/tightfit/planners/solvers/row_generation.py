"""Solve a program whose memory rows are added stage by stage, as solutions violate them.

Few stages of a step decide the cost of a plan. A program without the memory rows of the others is
much smaller to solve, and its bound holds for the whole program. A solution that violates none of
the rows left out is a solution of the whole program. That is an exact method: the cutting-plane
method of Dantzig, Fulkerson and Johnson (1954) with rows of the program itself as cuts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np

from tightfit.planners.solvers.program import Floats, LinearProgram, Solution, SolveOptions
from tightfit.planners.solvers.solve import solve
from tightfit.progress import SILENT, Progress

_TOLERANCE = 1e-3  # of rows that are scaled to about 1,000
_ADDED = 2  # groups added at a time
_COARSE = 10.0  # gaps to which programs are solved until one's solution violates nothing


def solve_by_rows(
    program: LinearProgram,
    options: SolveOptions,
    settle: Callable[[Floats], Floats],
    *,
    start: Floats | None = None,
    progress: Progress = SILENT,
    describe: Callable[[float, float], str] | None = None,
) -> Solution:
    """Solve a mixed-integer program by adding groups of rows until none is violated.

    `program`: the whole program, its rows in groups. `options`: limits; branch-and-bound nodes
    count for each of the programs solved. `settle`: returns a solution that is no worse, without
    unneeded values, and with the columns that only rows of groups define. `start`, `progress`,
    `describe`: as `tightfit.planners.solvers.solve` takes them. The solution is of the whole
    program: its bound is the best of the programs solved.
    """
    started = time.perf_counter()
    watched = set(violated_groups(program, settle(np.array(program.lower)))[:1])
    gap = _COARSE * options.gap
    best = Solution("unknown", None, math.inf, -math.inf)
    while True:
        target = max(options.target, best.bound + gap)
        left = options.seconds - (time.perf_counter() - started)
        solution = solve(
            program.only(watched),
            msgspec.structs.replace(options, seconds=left, target=target, gap=gap),
            start=start if best.values is None else best.values,
            progress=progress,
            describe=describe,
        )
        best = replace(best, bound=max(best.bound, solution.bound))
        if solution.values is None:
            return _ended(solution, best, options.gap)
        values = settle(solution.values)
        violated = set(violated_groups(program, values)[:_ADDED]) - watched
        ended = solution.status == "feasible" and solution.objective > target
        if not violated:
            status = solution.status if gap <= options.gap else "feasible"
            objective = float(program.costs @ values)
            best = _better(
                best, replace(solution, values=values, objective=objective, status=status)
            )
            if ended or gap <= options.gap or best.objective <= best.bound + options.gap:
                return _ended(solution, best, options.gap)
            gap = options.gap
        elif ended:
            return _ended(solution, best, options.gap)
        watched |= violated


def _better(best: Solution, found: Solution) -> Solution:
    """Return the better of two solutions, with the proof of the later and the best bound."""
    kept = found if found.objective < best.objective else best
    return replace(kept, bound=best.bound, status=found.status)


def _ended(last: Solution, best: Solution, gap: float) -> Solution:
    """Return the best solution of the whole program, with the bound and the proof of both."""
    if best.values is None:
        return replace(best, status="infeasible" if last.status == "infeasible" else "unknown")
    bound = min(best.bound, best.objective)
    status = "optimal" if best.objective <= bound + gap else best.status
    return replace(best, bound=bound, status=status)


def violated_groups(program: LinearProgram, values: Floats) -> list[int]:
    """Return the groups with violated rows, each the worst among its neighbours, worst first."""
    activities = program.activities(values)
    excess = np.maximum(program.row_lower - activities, activities - program.row_upper)
    beyond = np.maximum(program.lower - values, values - program.upper)
    defined = program.definitions()
    columns = program.indices[program.starts[defined]]
    excess[defined] = np.maximum(excess[defined], beyond[columns])
    worst = np.zeros(int(program.groups.max(initial=-1)) + 3)
    np.maximum.at(worst, program.groups + 1, excess)
    worst[0] = 0.0  # rows without a group
    peaks = [
        group
        for group in range(len(worst) - 2)
        if worst[group + 1] > max(_TOLERANCE, worst[group]) and worst[group + 1] >= worst[group + 2]
    ]
    peaks.sort(key=lambda group: -worst[group + 1])
    return peaks


def settle_equations(program: LinearProgram, values: Floats) -> None:
    """Set the columns that equations in groups define, in the order of the rows."""
    for row in program.definitions():
        terms = slice(program.starts[row], program.starts[row + 1])
        columns, coefficients = program.indices[terms], program.coefficients[terms]
        rest = float(coefficients[1:] @ values[columns[1:]])
        values[columns[0]] = (program.row_lower[row] - rest) / coefficients[0]
