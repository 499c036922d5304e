"""Moves of a plan, executed on the CPU: values are in a file while they are away.

In: an `Offload` (how much, in which folder) and a lowered program. Out: the program with its stores
and loads, and the bytes that each step has moved. Threads copy; memory is taken and given back in
the thread that runs the step, so that limits and meters see all of it.
"""
