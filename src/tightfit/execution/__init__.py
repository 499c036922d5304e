"""Plans run: as generated programs behind autograd, in place of a module's forward, watched.

In: a `Captured` step and a verified `Plan`. Out: a `Program` (forward and backward), a `Runner`
that makes it ordinary training, measured peaks of its steps. May import graph, plan, capture,
allocator and torch_private.
"""
