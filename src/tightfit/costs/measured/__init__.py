"""Costs by measurement on this machine: the only part of `costs` that imports PyTorch.

In: a function with real inputs. Out: its time, its workspace and its result (`call`); the roofline
of this CPU (`this_cpu`). May import graph, allocator and torch_private.
"""
