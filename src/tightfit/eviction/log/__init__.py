"""Instruction logs (Kirisame et al., Dynamic Tensor Rematerialization, appendix C.6).

`instructions` are the events of a program, `reader` and `writer` their text, and `resolve` turns
names into the operators, storages and events that a simulator replays.
"""
