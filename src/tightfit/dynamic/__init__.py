"""Programs as they run, op by op: kept to a budget by eviction, or recorded for the simulator.

In: a running program. Out: the same results in less memory (`region`), or an instruction log
(`recorder`). Ops are seen below autograd, on plain tensors; nothing about the program changes.
"""
