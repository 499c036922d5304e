"""Traces in files for later processes: values, graphs, and the installation they depend on.

In: a trace, or a file. Out: a file, or the trace again. Values without a meaning in another process
are not kept.
"""
