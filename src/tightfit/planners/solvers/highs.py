"""HiGHS, the embedded solver."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tightfit.planners.solvers.program import Floats, LinearProgram, Solution, SolveOptions


def solve_highs(
    program: LinearProgram,
    options: SolveOptions,
    start: Floats | None,
    report: Callable[[Solution], None],
) -> Solution:
    """Solve a program in this process; `report` receives every better solution or bound."""
    import highspy

    solver: Any = highspy.Highs()
    for name, value in _settings(options).items():
        solver.setOptionValue(name, value)
    solver.passModel(_model(highspy, program, options.relax))
    started_from = False
    if start is not None and not options.relax:
        given: Any = highspy.HighsSolution()
        given.col_value = start.tolist()
        started_from = solver.setSolution(given) == highspy.HighsStatus.kOk
    if not options.relax:
        _watch(solver, report)
    solver.run()
    return _solution(highspy, solver, program, options, started_from)


def _settings(options: SolveOptions) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "output_flag": False,
        "threads": options.threads,
        "time_limit": float(options.seconds),
        "mip_rel_gap": 0.0,
        "mip_abs_gap": max(options.gap, 1e-9),
        "random_seed": options.seed,
    }
    if options.nodes is not None:
        settings["mip_max_nodes"] = options.nodes
    if math.isfinite(options.target):
        settings["objective_target"] = options.target
    return settings


def _model(highspy: Any, program: LinearProgram, relax: bool) -> Any:
    model = highspy.HighsLp()
    model.num_col_ = program.columns
    model.num_row_ = program.rows
    model.col_cost_ = program.costs
    model.col_lower_ = program.lower
    model.col_upper_ = program.upper
    model.row_lower_ = program.row_lower
    model.row_upper_ = program.row_upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = program.starts
    model.a_matrix_.index_ = program.indices
    model.a_matrix_.value_ = program.coefficients
    if not relax:
        kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
        model.integrality_ = [kinds[kind] for kind in program.integer.tolist()]
    return model


def _watch(solver: Any, report: Callable[[Solution], None]) -> None:
    def improved(event: Any) -> None:
        found = event.data_out
        values = np.array(found.mip_solution)
        report(Solution("feasible", values, found.objective_function_value, found.mip_dual_bound))

    def logged(event: Any) -> None:
        report(Solution("unknown", None, math.inf, event.data_out.mip_dual_bound))

    solver.cbMipImprovingSolution.subscribe(improved)
    solver.cbMipLogging.subscribe(logged)


def _solution(
    highspy: Any, solver: Any, program: LinearProgram, options: SolveOptions, started_from: bool
) -> Solution:
    status = solver.getModelStatus()
    statuses = highspy.HighsModelStatus
    if status in (statuses.kInfeasible, statuses.kUnboundedOrInfeasible):
        return Solution("infeasible", None, math.inf, math.inf, started_from)
    info = solver.getInfo()
    solved = status == statuses.kOptimal
    if options.relax:
        if not solved:
            return Solution("unknown", None, math.inf, -math.inf)
        objective = info.objective_function_value
        return Solution("optimal", np.array(solver.getSolution().col_value), objective, objective)
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    bound = info.mip_dual_bound if abs(info.mip_dual_bound) < 1e29 else -math.inf
    if not feasible:
        return Solution("unknown", None, math.inf, bound, started_from)
    values = np.array(solver.getSolution().col_value)
    objective = float(program.costs @ values)
    bound = min(bound, objective)
    return Solution("optimal" if solved else "feasible", values, objective, bound, started_from)
