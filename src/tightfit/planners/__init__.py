"""Planners: from a task (a graph and a budget) to an outcome (a verified plan and a bound).

`base` defines a planner, `registry` has the table of planners, and every planner ends in
`outcomes`. `engine` and `stages` are two views of a task, ours and the papers'; `solvers` solve
programs; each method has a folder or a file, and `questions` are asked of planners. Imports graph,
plan, eviction and the C++ core; never PyTorch.
"""
