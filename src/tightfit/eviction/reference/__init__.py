"""The simulator in readable Python: what the C++ core must find, for programs of any form.

`replay` is the paper's appendix C step by step, `state` what changes meanwhile.
"""
