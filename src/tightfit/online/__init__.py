"""Programs as they run, op by op: recorded into an instruction log for the simulator.

Ops are seen below autograd, on plain tensors; nothing about the program changes.
"""
