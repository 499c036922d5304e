"""The packers of the C++ core, which releases the interpreter lock while it packs."""

from __future__ import annotations

from tightfit._core import _engine
from tightfit.layout.blocks import Block
from tightfit.layout.packers.base import Packer, PackingLimits, Placement


def core_packer(name: str) -> Packer:

    def pack(blocks: tuple[Block, ...], limits: PackingLimits) -> Placement:
        offsets, proven_bytes = _engine.pack(
            name,
            [block.lower for block in blocks],
            [block.upper for block in blocks],
            [block.size_bytes for block in blocks],
            limits.seconds,
            limits.seed,
        )
        return Placement(tuple(offsets), proven_bytes)

    return pack
