"""Values that a forward reads in Python: answered while it is traced, checked by every later step.

In: the operators of a traced forward, real inputs and buffers, and what a real run was told. Out:
`Decisions` that hold for a call or not, and `Question`s, ops of the step that check an `Answer`.
May import calls, nodes and origins.
"""
