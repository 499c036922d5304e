"""The addresses of steps on a GPU: planned, or wherever its allocator puts them.

In: a callable's account and options, plans that are to run, what the device's allocator says.
Out: programs that run plans so, and what plans leave of the budget for it.
"""
