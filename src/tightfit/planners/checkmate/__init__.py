"""Checkmate: optimal rematerialisation as a mixed-integer program (Jain et al., 2020).

Equation numbers refer to arXiv:1910.02653v3. `variables` holds the columns, `constraints` one
function per family, `objective` the cost, `program` puts them together, `rounding` is the
approximation by two-phase rounding, `planner` the planners.
"""
