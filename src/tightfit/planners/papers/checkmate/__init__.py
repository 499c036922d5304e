"""Checkmate: optimal rematerialisation as a mixed-integer program (Jain et al., 2020).

From a `Task` to the optimum of its search space. `variables` holds the columns, `constraints` one
function per family, `program` puts them together, `planner` holds the planners. Equation numbers
refer to arXiv:1910.02653v3. Imports `stages` and `solvers`; the registry lends the default planner.
"""
