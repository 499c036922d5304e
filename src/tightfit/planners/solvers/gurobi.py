"""Gurobi, the commercial solver of the papers: optional, behind the same interface."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tightfit.errors import MissingExtra
from tightfit.planners.solvers.program import Floats, LinearProgram, Solution, SolveOptions


def solve_gurobi(
    program: LinearProgram,
    options: SolveOptions,
    start: Floats | None,
    report: Callable[[Solution], None],
) -> Solution:
    """Solve a program in this process; `report` receives every better solution or bound.

    Raises `MissingExtra` if gurobipy is not installed. It also needs a licence for programs of more
    than 2,000 columns or rows; without one it raises its own error.
    """
    try:
        import gurobipy
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "solver 'gurobi' needs gurobipy: pip install tightfit[gurobi]"
        ) from error
    grb: Any = gurobipy
    with grb.Env(params=_parameters(options)) as environment, grb.Model(env=environment) as model:
        kinds = np.where(program.integer == 1, "I", "C") if not options.relax else "C"
        x = model.addMVar(
            program.columns, lb=program.lower, ub=program.upper, obj=program.costs, vtype=kinds
        )
        _add_rows(model, x.tolist(), program)
        if start is not None and not options.relax:
            x.Start = start
        model.optimize(_watcher(grb, x, report))
        return _solution(grb, model, x, options, start is not None)


def _parameters(options: SolveOptions) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "OutputFlag": 0,
        "TimeLimit": options.seconds,
        "MIPGap": 0.0,
        "MIPGapAbs": max(options.gap, 1e-9),
        "Threads": options.threads,
        "Seed": options.seed,
    }
    if options.nodes is not None:
        parameters["NodeLimit"] = options.nodes
    if math.isfinite(options.target):
        parameters["BestObjStop"] = options.target
    return parameters


def _add_rows(model: Any, columns: list[Any], program: LinearProgram) -> None:
    starts = program.starts.tolist()
    indices = program.indices.tolist()
    coefficients = program.coefficients.tolist()
    for row in range(program.rows):
        terms = range(starts[row], starts[row + 1])
        total = sum(coefficients[term] * columns[indices[term]] for term in terms)
        lower, upper = program.row_lower[row], program.row_upper[row]
        if lower == upper:
            model.addConstr(total == lower)
            continue
        if math.isfinite(lower):
            model.addConstr(total >= lower)
        if math.isfinite(upper):
            model.addConstr(total <= upper)


def _watcher(grb: Any, x: Any, report: Callable[[Solution], None]) -> Callable[[Any, int], None]:
    def watch(model: Any, where: int) -> None:
        if where == grb.GRB.Callback.MIPSOL:
            objective = model.cbGet(grb.GRB.Callback.MIPSOL_OBJ)
            bound = model.cbGet(grb.GRB.Callback.MIPSOL_OBJBND)
            values = np.asarray(model.cbGetSolution(x))
            report(Solution("feasible", values, objective, bound))
        elif where == grb.GRB.Callback.MIP:
            bound = model.cbGet(grb.GRB.Callback.MIP_OBJBND)
            report(Solution("unknown", None, math.inf, bound))

    return watch


def _solution(grb: Any, model: Any, x: Any, options: SolveOptions, started: bool) -> Solution:
    if model.Status in (grb.GRB.INFEASIBLE, grb.GRB.INF_OR_UNBD):
        return Solution("infeasible", None, math.inf, math.inf, started)
    solved = model.Status == grb.GRB.OPTIMAL
    if model.SolCount == 0:
        bound = -math.inf if options.relax else model.ObjBound
        return Solution("unknown", None, math.inf, bound, started)
    objective = model.ObjVal
    bound = objective if options.relax else min(model.ObjBound, objective)
    return Solution("optimal" if solved else "feasible", np.asarray(x.X), objective, bound, started)
