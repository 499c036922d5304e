"""The addresses of steps on a GPU: planned, or wherever its allocator puts them.

In: a callable's account and options, plans that are to run, statistics of the device's allocator.
Out: programs that run plans so, and the bytes of the budget that plans leave for it.
"""
