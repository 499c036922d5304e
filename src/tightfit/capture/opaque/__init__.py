"""Modules that run eagerly inside a planned step, as one op forward and one backward.

In: modules that are marked or named, and the arguments they are called with. Out: `OpaqueModules`:
for each call an op, with its measured bytes and tensors kept for its backward. May import calls,
side_effects, origins, the measuring of costs and the allocator.
"""
