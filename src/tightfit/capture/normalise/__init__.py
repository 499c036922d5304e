"""Exact clean-ups of a traced step: every bit of its results stays, copies and surprises go.

In: a frozen `JointGraph`. Out: a new `JointGraph`, after every function of `PASSES`, each of which
changes a `Rewriting`, the copy that is worked on. May import joint_graph, the floors below it, and
the functions that `operators` puts in place of operators.
"""
