"""The core of the online runtime in C++, compiled once for a PyTorch.

In: the C++ files here, a compiler, PyTorch's headers. Out: a `Core` that sees operators on a
dispatch key below autograd, without Python. Reading schemas, finding parameters, the words of
errors and the optimizer's steps stay in Python. `history.hpp`, `pool.hpp` and the others are the
twins of the files of the same names in `dynamic/`.
"""
