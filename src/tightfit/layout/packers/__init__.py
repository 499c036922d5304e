"""Packers: from blocks to offsets. `registry` names them all.

Those of the core are functions in C++; `mip` is the paper's integer program and `cpsat` a
constraint program, both for few blocks: they prove layouts of the others.
"""
