"""The program of a plan as fused kernels of Inductor.

In: a `Captured` step and its `Program`. Out: a `Program` that keeps and recomputes the same values,
in roughly the same bytes. May import the rooms that execution may, and execution's lowering.
"""
