"""What every packer is: a function of blocks and limits, with declared abilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from tightfit.layout.blocks import Block

__all__ = ["Packer", "PackingLimits", "Placement", "Registration"]


class PackingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When a packer stops.

    Parameters
    ----------
    seconds : float
        Wall time; packers that construct one layout take what they take.
    seed : int
        Seed of every random choice.
    """

    seconds: float = 5.0
    seed: int = 0


class Placement(msgspec.Struct, frozen=True):
    """What a packer found.

    Parameters
    ----------
    offsets : tuple of int
        In bytes, one per block.
    proven_bytes : int
        No layout of these blocks is lower; 0: nothing is proven.
    """

    offsets: tuple[int, ...]
    proven_bytes: int = 0


Packer: TypeAlias = Callable[[tuple[Block, ...], PackingLimits], Placement]
"""Places blocks whose sizes are positive and rounded; the layout is validated afterwards."""


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """A packer and what it can do.

    Parameters
    ----------
    pack : callable
        The packer.
    summary : str
        What it does, in a line.
    is_exact : bool
        Given time, it finds a lowest layout and proves it.
    extra : str or None
        The optional dependency it needs, as in ``pip install tightfit[extra]``.
    reference : str
        Paper, section.
    """

    pack: Packer
    summary: str
    is_exact: bool = False
    extra: str | None = None
    reference: str = ""
