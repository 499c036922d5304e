"""Where steps lie on a GPU: at planned addresses, or wherever its allocator puts them.

In: a callable's account and options, plans that are to run, what the device's allocator says.
Out: programs that run plans so, and what plans leave of the budget for it.
"""
