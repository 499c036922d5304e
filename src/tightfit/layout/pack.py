"""Lay blocks out with any packer: sizes rounded, blocks without memory left out, all validated."""

from __future__ import annotations

import time
from collections.abc import Iterable

from tightfit.errors import BadInput, InvalidLayout
from tightfit.graph.ir import Graph
from tightfit.layout.blocks import CPU_ALIGNMENT_BYTES, Block, Layout, Packed, largest_load
from tightfit.layout.packers.base import PackingLimits
from tightfit.layout.packers.registry import DEFAULT_PACKER, PACKERS
from tightfit.layout.validate import validate_layout
from tightfit.plan.lives import lives_of
from tightfit.plan.plan import Plan


def blocks_of_plan(graph: Graph, plan: Plan) -> tuple[Block, ...]:
    """Return the blocks of a valid plan: its lives, numbered in their order."""
    return tuple(
        Block(number, life.lower, life.upper, life.size_bytes)
        for number, life in enumerate(lives_of(graph, plan))
    )


def pack_plan(graph: Graph, plan: Plan) -> Packed:
    """Return the layout of a valid plan's lives, in their order, rounded as its device rounds."""
    return pack(blocks_of_plan(graph, plan), alignment_bytes=graph.device.granularity_bytes)


def pack(
    blocks: Iterable[Block],
    packer: str = DEFAULT_PACKER,
    limits: PackingLimits | None = None,
    *,
    alignment_bytes: int = CPU_ALIGNMENT_BYTES,
) -> Packed:
    """Return the lowest layout that a packer finds, validated.

    `blocks`: to be laid out. `packer`: a name in `PACKERS`. `limits`: when to stop; by default
    after 5 s. `alignment_bytes`: sizes are rounded up to it, and every offset is a multiple of it.
    Raises `BadInput` for an unknown packer, or blocks it does not take. Raises `MissingExtra` if
    the packer needs a package that is not installed.
    """
    if packer not in PACKERS:
        raise BadInput(f"no packer is called {packer!r} (known: {', '.join(PACKERS)})")
    if alignment_bytes < 1:
        raise BadInput(f"the alignment must be at least 1 byte, got {alignment_bytes}")
    blocks = tuple(blocks)
    started = time.perf_counter()
    rounded = {
        position: Block(position, block.lower, block.upper, block.rounded_bytes(alignment_bytes))
        for position, block in enumerate(blocks)
        if block.size_bytes > 0 and block.lower < block.upper
    }
    offsets, proven_bytes = [0] * len(blocks), 0
    if rounded:
        placement = PACKERS[packer].pack(tuple(rounded.values()), limits or PackingLimits())
        proven_bytes = placement.proven_bytes
        for position, offset in zip(rounded, placement.offsets, strict=True):
            offsets[position] = offset
    seconds = time.perf_counter() - started
    layout = Layout(blocks=blocks, offsets=tuple(offsets), alignment_bytes=alignment_bytes)
    validate_layout(layout)
    least = largest_load(blocks, alignment_bytes)
    if proven_bytes > layout.height_bytes:
        raise InvalidLayout(
            f"packer {packer!r} says that {proven_bytes} bytes are needed, and its own layout "
            f"takes {layout.height_bytes}"
        )
    return Packed(
        layout=layout,
        packer=packer,
        lower_bound_bytes=least,
        proven_bytes=max(least, proven_bytes),
        seconds=seconds,
    )
