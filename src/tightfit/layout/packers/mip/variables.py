"""The columns of the program, in units in which the available memory W is 100."""

from __future__ import annotations

from tightfit.layout.blocks import Block, largest_load
from tightfit.planners.solvers import ProgramBuilder

MEMORY_UNITS = 100.0
"""W of the paper."""


class Variables:
    """u, x_i and z_ij of the paper.

    `blocks`: B: to be placed. `pairs`: E: positions of blocks that are alive at the same time.
    `memory_bytes`: W: the height of some layout. `peak`: column u: the peak memory usage. The
    objective (equation 1) is this column alone, and 0 <= u <= W (equation 5). That it is no less
    than the largest load is ours. `offset`: columns x_i >= 0 (equation 6). `is_above`: columns
    z_ij: 0 if block i is below block j, 1 if it is above.
    """

    def __init__(
        self, blocks: tuple[Block, ...], pairs: tuple[tuple[int, int], ...], memory_bytes: int
    ) -> None:
        self.blocks = blocks
        self.builder = ProgramBuilder()
        self.bytes_per_unit = memory_bytes / MEMORY_UNITS
        least = largest_load(blocks) / self.bytes_per_unit
        self.peak = self.builder.real(lower=least, upper=MEMORY_UNITS, cost=1.0)
        self.offset = [self.builder.real(lower=0.0, upper=MEMORY_UNITS) for _ in blocks]
        self.is_above = {pair: self.builder.binary() for pair in pairs}

    def size(self, position: int) -> float:
        """w_i: the size of a block, in units."""
        return self.blocks[position].size_bytes / self.bytes_per_unit
