"""The engine's view of a task: ops, values and alternatives as numbers, for the C++ core.

From a `Task` to an `EngineProblem`, and from the engine's schedule back to computes; on it the
greedy descent and the proof that some op needs more than the budget. Imports only `base`, `bounds`,
`outcomes`, and `_core`.
"""
