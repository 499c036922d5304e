"""Where a GPU's allocator places steps: at planned addresses, or at addresses of its choice.

In: a callable's account and options, plans that are to run, statistics of the device's allocator.
Out: programs that run the plans, and the bytes of the budget that plans leave for the allocator.
"""
