"""Steps that repeat run by a plan: recorded while eviction decides, planned, followed.

In: what the runtime is told of each operator. Out: what is brought back before it, and what may
lose its memory after it. Everything here only chooses among what the runtime may do anyway, so a
wrong choice costs time and never changes a result; the allocator keeps the budget.
"""
