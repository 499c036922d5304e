"""Pairs of blocks that live together: the disjunctions of programs for few blocks."""

from __future__ import annotations

from tightfit.errors import BadInput
from tightfit.layout.blocks import Block

_MOST_PAIRS = 20_000


def colliding_pairs(blocks: tuple[Block, ...]) -> tuple[tuple[int, int], ...]:
    """Return E: all positions i < j of blocks that are alive at the same time.

    Raises `BadInput` if there are more than a program of this kind can have.
    """
    pairs: list[tuple[int, int]] = []
    by_birth = sorted(range(len(blocks)), key=lambda position: blocks[position].lower)
    alive: list[int] = []
    for position in by_birth:
        alive = [other for other in alive if blocks[other].upper > blocks[position].lower]
        pairs += [(min(position, other), max(position, other)) for other in alive]
        alive.append(position)
        if len(pairs) > _MOST_PAIRS:
            raise BadInput(
                f"packer 'mip' takes at most {_MOST_PAIRS:,} pairs of blocks that live "
                f"together, and these {len(blocks):,} blocks have more: use packer 'auto'"
            )
    return tuple(sorted(pairs))


def compacted(blocks: tuple[Block, ...], heights: list[float]) -> tuple[int, ...]:
    """Return whole offsets from a solver's numbers: from the lowest up, each as low as it can be.

    Rounding by a solver may leave a layout with tiny overlaps or holes; this layout has neither,
    and where the numbers were right it is nowhere higher.
    """
    offsets = [0] * len(blocks)
    placed: list[int] = []
    for position in sorted(range(len(blocks)), key=lambda p: heights[p]):
        block = blocks[position]
        offsets[position] = max(
            (
                offsets[other] + blocks[other].size_bytes
                for other in placed
                if blocks[other].lower < block.upper and block.lower < blocks[other].upper
            ),
            default=0,
        )
        placed.append(position)
    return tuple(offsets)
