"""The papers' view of a task: nodes in stages, one implementation each.

From a `Task` to a `Staged` problem, from residency between stages to computes and back; answers
without a solver, and the units of solvers. Imports `base`, `bounds`, `outcomes` and `solvers`;
Checkmate, MONeT, retention intervals, heuristics and eviction use it.
"""
