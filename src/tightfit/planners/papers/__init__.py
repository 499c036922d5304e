"""Planners of papers: baselines for the default planner, and starts for its search.

From a `Task` to the `Outcome` of a published method. `stages` is the papers' view of a task;
`checkmate`, `monet` and `intervals` are exact programs, `chen`, `griewank`, `gist` and `eviction`
heuristics, which share `checkpoints` and `proposals`. Nothing outside imports this folder: the
registry knows its planners by name.
"""
