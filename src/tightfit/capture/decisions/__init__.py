"""Numbers that a forward reads of its inputs: known while it is traced, compared with each call.

In: the operators of a traced forward, real inputs and buffers. Out: `Decisions` that hold for a
call or not, and numbers that are inputs of the step. May import calls, nodes and origins.
"""
