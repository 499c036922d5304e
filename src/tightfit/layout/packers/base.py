"""The interface of packers: functions of blocks and limits, with declared capabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from tightfit._core import _engine
from tightfit.layout.blocks import Block


class PackingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When a packer stops."""

    seconds: float = 5.0  # wall time; packers that construct one layout ignore it
    seed: int = 0  # seed of every random choice


class Placement(msgspec.Struct, frozen=True):
    """The result of a packer."""

    offsets: tuple[int, ...]  # in bytes, one per block
    proven_bytes: int = 0  # no layout of these blocks is lower; 0: nothing is proven


Packer: TypeAlias = Callable[[tuple[Block, ...], PackingLimits], Placement]
"""Places blocks whose sizes are positive and rounded; the layout is validated afterwards."""


def core_packer(name: str) -> Packer:
    """Return a packer of the C++ core, which releases the interpreter lock while it packs."""

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


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """A packer and its properties."""

    pack: Packer  # the packer
    summary: str  # one line
    is_exact: bool = False  # given time, it finds a lowest layout and proves it
    # The optional dependency it needs, as in ``pip install tightfit[extra]``
    extra: str | None = None
    reference: str = ""  # paper, section
