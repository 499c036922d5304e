"""Moves of a plan, executed: values are in far memory while they are away.

On the CPU that is a file (`file`), copied by threads; on a GPU pinned memory of the host
(`pinned`), copied by streams. In: an `Offload` (how much, in which folder) and a lowered program.
Out: the program with its stores and loads, and the bytes that each step has moved. Memory is taken
and given back in the thread and the stream that run the step, so limits and meters see all of it.
"""
