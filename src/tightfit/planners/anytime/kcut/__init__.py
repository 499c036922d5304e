"""The K-cut program: memory is looked at only while K chosen ops run for the first time.

Every schedule satisfies it, with any number of recomputations, so its optimum is a lower bound for
the given order of first computations. Its solution, made complete, is a good seed. From a
`RelaxedProblem` and cuts to a `CutProgram` (docs/search.md, "The K-cut program"). Imports
`relaxation` and `solvers`.
"""
