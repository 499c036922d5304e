"""One small interface to mixed-integer linear programming solvers, in process or in a child."""

from tightfit.planners.solvers.program import LinearProgram, ProgramBuilder, Solution, SolveOptions
from tightfit.planners.solvers.row_generation import settle_equations, solve_by_rows
from tightfit.planners.solvers.solve import SOLVERS, solve
from tightfit.planners.solvers.tightening import grains, within_reach

__all__ = [
    "SOLVERS",
    "LinearProgram",
    "ProgramBuilder",
    "Solution",
    "SolveOptions",
    "grains",
    "settle_equations",
    "solve",
    "solve_by_rows",
    "within_reach",
]
