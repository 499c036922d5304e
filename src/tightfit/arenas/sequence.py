"""The requests of one step with their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tightfit.allocator.recording import RecordedBlock, Recording
from tightfit.layout.blocks import CPU_ALIGNMENT_BYTES, Block, largest_load
from tightfit.layout.pack import pack
from tightfit.layout.packers.base import PackingLimits
from tightfit.layout.predecessors import predecessors

_LIMITS = PackingLimits(seconds=1.0)
"""Between two steps: recorded steps of real training take a small part of it."""


@dataclass(frozen=True)
class Sequenced:
    """A step's requests in their order, laid out."""

    # One per request of the thread that takes the steps; empty lifetimes: it is outside
    blocks: tuple[Block, ...]
    offsets: tuple[int, ...]  # the place of each; -1: outside, because it outlived the step
    # height_bytes, lower_bound_bytes: of the arena it needs, and the largest load
    height_bytes: int
    lower_bound_bytes: int
    predecessors: tuple[tuple[int, ...], ...]  # of each request
    # outlived_bytes, elsewhere_bytes: bytes outside: blocks that outlived the step; the most
    # that other threads, and interrupted parts, held at one time
    outlived_bytes: int = 0
    elsewhere_bytes: int = 0

    @property
    def sizes(self) -> list[int]:
        """Bytes that each request takes, rounded."""
        return [block.rounded_bytes(CPU_ALIGNMENT_BYTES) for block in self.blocks]


def sequenced(recording: Recording) -> Sequenced:
    """Lay out a recorded step.

    Blocks that outlived the step have no place: the next step would find it taken.
    """
    requests = enumerate(_requests(recording))
    blocks = [_block(number, block, recording.last_tick) for number, block in requests]
    elsewhere = [Block(b.id, b.lower, b.upper, b.size_bytes) for b in recording.blocks if b.thread]
    return replace(
        _laid_out(blocks),
        outlived_bytes=sum(
            b.rounded_bytes(CPU_ALIGNMENT_BYTES) for b in blocks if b.lower == b.upper
        ),
        elsewhere_bytes=largest_load(elsewhere, CPU_ALIGNMENT_BYTES),
    )


def requested_sizes(recording: Recording) -> list[int]:
    return [block.size_bytes for block in _requests(recording)]


def _requests(recording: Recording) -> list[RecordedBlock]:
    """Return the requests of the thread that recorded: only they are looked up in a replay."""
    return [block for block in recording.blocks if block.thread == 0]


def enlarged(step: Sequenced, wanted: Sequence[int]) -> Sequenced:
    """Lay a step out again with larger requests, as the paper does (section 4.3)."""
    blocks = [
        Block(block.id, block.lower, block.upper, max(block.size_bytes, size))
        for block, size in zip(step.blocks, wanted, strict=True)
    ]
    outlived, elsewhere = step.outlived_bytes, step.elsewhere_bytes
    return replace(_laid_out(blocks), outlived_bytes=outlived, elsewhere_bytes=elsewhere)


def _block(number: int, recorded: RecordedBlock, last_tick: int) -> Block:
    outlives = recorded.upper >= last_tick
    upper = recorded.lower if outlives else recorded.upper
    return Block(number, recorded.lower, upper, recorded.size_bytes)


def _laid_out(blocks: list[Block]) -> Sequenced:
    inside = [block for block in blocks if block.lower < block.upper]
    packed = pack(inside, limits=_LIMITS)
    offsets = [-1] * len(blocks)
    for block, offset in zip(inside, packed.layout.offsets, strict=True):
        offsets[block.id] = offset
    sizes = [block.rounded_bytes(CPU_ALIGNMENT_BYTES) for block in blocks]
    return Sequenced(
        blocks=tuple(blocks),
        offsets=tuple(offsets),
        height_bytes=packed.height_bytes,
        lower_bound_bytes=packed.lower_bound_bytes,
        predecessors=predecessors(sizes, offsets),
    )
