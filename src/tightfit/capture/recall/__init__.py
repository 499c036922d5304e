"""Traces in files: values, graphs and what PyTorch and this machine are like, for later processes.

In: a trace, or a file. Out: a file, or the trace again. What means nothing in another process is
not kept.
"""
