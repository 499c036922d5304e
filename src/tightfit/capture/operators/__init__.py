"""Operators that are traced differently from how PyTorch's tracer does it.

In: operators as a forward calls them. Out: the same results, bit for bit, by operators that the
tracer sees through. May import torch_private alone.
"""
