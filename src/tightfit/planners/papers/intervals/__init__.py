"""Retention intervals on the constraint solver CP-SAT: Moccasin (Bartan et al., ICML 2023).

From a `Task` to the optimum with few intervals per value. `planner` runs `model` in a child
process, the only file that imports OR-Tools. Imports `stages`, and `solvers` for the child.
"""
