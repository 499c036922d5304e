"""Operators that are traced otherwise than PyTorch's tracer does by itself.

In: operators as a forward calls them. Out: the same results, bit for bit, by operators that the
tracer sees through. May import torch_private alone.
"""
