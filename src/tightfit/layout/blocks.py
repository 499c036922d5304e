"""Blocks of memory with lifetimes, layouts of them, and results of packers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tightfit.units import rounded_up

FORMAT = 1

CPU_ALIGNMENT_BYTES = 64
"""How PyTorch aligns memory on a CPU."""


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One lifetime of one allocation, planned or recorded."""

    id: int  # its name; no two blocks of a layout share one
    # lower, upper: alive at the ticks [lower, upper). At equal ticks blocks that end free their
    # places before blocks that begin take them.
    lower: int
    upper: int
    size_bytes: int  # as requested, not rounded

    def rounded_bytes(self, alignment_bytes: int) -> int:
        """Return its size as a layout counts it: up to the next multiple of the alignment."""
        return rounded_up(self.size_bytes, alignment_bytes)


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An offset for every block."""

    blocks: tuple[Block, ...]  # those laid out
    offsets: tuple[int, ...]  # the first byte of each, counted from the start of the arena
    # Divides every offset; a block takes its size rounded up to it
    alignment_bytes: int = CPU_ALIGNMENT_BYTES
    format: int = FORMAT

    @property
    def height_bytes(self) -> int:
        """Bytes of the arena: where the highest block ends."""
        placed = zip(self.blocks, self.offsets, strict=True)
        return max((o + b.rounded_bytes(self.alignment_bytes) for b, o in placed), default=0)


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    """A validated layout, its bound and figures."""

    layout: Layout  # of the packer
    packer: str  # its name
    lower_bound_bytes: int  # the largest load: the most rounded bytes alive at one time
    proven_bytes: int  # no layout of these blocks is lower; at least the lower bound
    seconds: float  # wall time spent

    @property
    def height_bytes(self) -> int:
        return self.layout.height_bytes

    @property
    def ratio(self) -> float:
        """Height / largest load; 1.0 is perfect, and the rest is fragmentation."""
        return self.height_bytes / self.lower_bound_bytes if self.lower_bound_bytes else 1.0

    @property
    def is_proven_optimal(self) -> bool:
        """Whether no layout of these blocks is lower."""
        return self.height_bytes <= self.proven_bytes


def largest_load(blocks: Sequence[Block], alignment_bytes: int = 1) -> int:
    """Return the most bytes alive at one time, sizes rounded up to an alignment."""
    changes: list[tuple[int, int]] = []
    for block in blocks:
        if block.lower < block.upper:
            size = block.rounded_bytes(alignment_bytes)
            changes += [(block.lower, size), (block.upper, -size)]
    alive = most = 0
    for _, change in sorted(changes):  # at equal ticks the negative changes come first
        alive += change
        most = max(most, alive)
    return most
