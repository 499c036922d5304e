"""Costs by measurement on this machine: the only part of `costs` that imports PyTorch.

In: a function with real inputs. Out: how long it takes, which workspace it needs and what it
returns (`call`); the roofline of this CPU (`this_cpu`). May import graph, allocator and
torch_private.
"""
