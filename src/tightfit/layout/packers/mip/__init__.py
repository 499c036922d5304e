"""The integer program of Sekiyama et al. (arXiv 1804.10001), section 3.1, on HiGHS.

Columns are in `variables`, one function per family of constraints in `constraints`; `packer`
solves it. For few blocks: it proves the optimum that the other packers are tested against.
"""
