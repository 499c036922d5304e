"""The simulator in readable Python: the reference for the C++ core, for programs of any form.

`replay` is the paper's appendix C step by step, `state` the values that change meanwhile.
"""
