"""One small interface to mixed-integer linear programming solvers.

From a `LinearProgram` and `SolveOptions` to a `Solution` with a bound. It is solved in this process
or in a child that keeps its limits, whole or by groups of rows, lowered to numbers that sums can
reach. Imports nothing of planners.
"""

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
