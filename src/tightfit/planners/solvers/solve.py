"""Solve a program: small ones in this process, others in a child that keeps its limits."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from tightfit.errors import BadInput, MissingExtra
from tightfit.planners.child import run_in_child
from tightfit.planners.solvers.gurobi import solve_gurobi
from tightfit.planners.solvers.highs import solve_highs
from tightfit.planners.solvers.program import (
    Floats,
    LinearProgram,
    Solution,
    SolveOptions,
    from_bytes,
    to_bytes,
)
from tightfit.progress import SILENT, Progress, shown

_Solver = Callable[
    [LinearProgram, SolveOptions, "Floats | None", Callable[[Solution], None]], Solution
]

SOLVERS: dict[str, _Solver] = {"highs": solve_highs, "gurobi": solve_gurobi}
_MODULES = {"highs": "highspy", "gurobi": "gurobipy"}
_SMALL_COLUMNS = 1500


class _Task(msgspec.Struct, frozen=True):
    program: LinearProgram
    options: SolveOptions
    start: Floats | None


_Report: TypeAlias = tuple[Solution, bool]
"""A solution, and whether it is the last."""


def solve(
    program: LinearProgram,
    options: SolveOptions,
    *,
    start: Floats | None = None,
    progress: Progress = SILENT,
    describe: Callable[[float, float], str] | None = None,
    in_child: bool = False,
) -> Solution:
    """Solve a mixed-integer linear program or its relaxation.

    `program`: scale it to objectives of about 100 and coefficients of at most about 1,000. `start`
    (columns,): a feasible solution to start from. `progress`: shows solutions and bounds; an
    interruption ends the search with the best so far. `describe`: turns (objective, bound) into a
    note for people. `in_child`: use a child process even for a small program, so that it can be
    interrupted. Raises `BadInput` for an unknown solver. Raises `MissingExtra` if the solver is not
    installed.
    """
    solver = options.solver
    if solver not in SOLVERS:
        raise BadInput(f"no solver is called {solver!r} (known: {', '.join(sorted(SOLVERS))})")
    if importlib.util.find_spec(_MODULES[solver]) is None:
        raise MissingExtra(
            f"solver {solver!r} needs {_MODULES[solver]}: pip install tightfit[{solver}]"
        )
    if options.seconds <= 0:
        return Solution("unknown", None, math.inf, -math.inf)
    if program.columns <= _SMALL_COLUMNS and not in_child:
        return SOLVERS[solver](program, options, start, lambda _: None)
    return _solve_in_child(program, options, start, progress, describe or _plain)


def _plain(objective: float, bound: float) -> str:
    return f"best {objective:.4g}, bound {bound:.4g}"


class _Best:
    """The best solution and bound that a child has reported."""

    def __init__(self, progress: Progress, describe: Callable[[float, float], str]) -> None:
        self.progress = progress
        self.describe = describe
        self.reports = 0
        self.best = Solution("unknown", None, math.inf, -math.inf)
        self.final: Solution | None = None

    def receive(self, data: bytes) -> None:
        """Take in one report; may raise KeyboardInterrupt."""
        self.reports += 1
        if data:
            solution, is_final = from_bytes(data, _Report)
            if is_final:
                self.final = solution
            bound = max(self.best.bound, min(solution.bound, solution.objective))
            better = solution.objective < self.best.objective
            values = solution.values if better else self.best.values
            objective = min(solution.objective, self.best.objective)
            status = "unknown" if values is None else "feasible"
            self.best = Solution(status, values, objective, bound, solution.started_from)
        self.progress.update(self.reports, self.describe(self.best.objective, self.best.bound))


def _solve_in_child(
    program: LinearProgram,
    options: SolveOptions,
    start: Floats | None,
    progress: Progress,
    describe: Callable[[float, float], str],
) -> Solution:
    best = _Best(progress, describe)
    with (
        contextlib.suppress(KeyboardInterrupt),
        shown(
            progress,
            f"{options.solver}: {program.columns} variables, {program.rows} constraints",
            at_most_s=options.seconds,
        ),
    ):
        run_in_child(
            "tightfit.planners.solvers.solve:serve",
            to_bytes(_Task(program, options, start)),
            seconds=options.seconds * 1.05 + 1.0,
            on_report=best.receive,
        )
    return best.final or best.best


def serve(payload: bytes, report: Callable[[bytes], None]) -> None:
    """Solve the task of the parent process and report to it."""
    task = from_bytes(payload, _Task)

    def tell(solution: Solution, *, is_final: bool = False) -> None:
        report(to_bytes((solution, is_final)))

    tell(SOLVERS[task.options.solver](task.program, task.options, task.start, tell), is_final=True)
