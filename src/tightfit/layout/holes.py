"""Fillers: they leave memory free only where the next op is to find it, which leads an allocator.

An allocator that takes no address uses the smallest free stretch that is large enough. Where
everything that is free is held by fillers but for the places of the op that runs next, it can take
no other. Fillers are ordinary requests themselves: stretches freed since are held again by requests
of just their sizes. Then one filler at a time is freed. The bytes before a place, the place and the
rest are requested one after the other, from the only free stretch there is. The fillers of a step
follow from its layout alone.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tightfit.graph.ir import Graph
from tightfit.layout.blocks import Block, largest_load
from tightfit.layout.pack import pack
from tightfit.plan.lives import Life, lives_of
from tightfit.plan.plan import Plan
from tightfit.units import rounded_up

SMALL_BYTES = 1 << 20
"""Up to this, PyTorch's CUDA allocator serves requests from segments of their own."""

CELL_BYTES = 2 << 20
"""Divides every place: all that is free between places is then larger than small."""

LEAST_BYTES = 10 << 20
"""From this on, a segment of the allocator is as large as the request, in cells."""

GRANULARITY_BYTES = 512
"""The allocator rounds requests to multiples of it."""


@dataclass(frozen=True)
class Filler:
    """A stretch that is held while it is unused."""

    # Its name within a script; None: it is the place of a request, held for a moment
    number: int | None
    # offset, size_bytes: its position
    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


@dataclass(frozen=True)
class Opening:
    """One free stretch, made of fillers, that is divided again."""

    # Fillers to free: they are adjacent, and nothing else is free then
    drops: tuple[int, ...]
    # To hold then, from its begin to its end; places of the instruction are among them
    pieces: tuple[Filler, ...]


@dataclass(frozen=True)
class Turn:
    """The requests and frees before an instruction."""

    # Whether the instruction's requests are in the arena; if not, nothing else is done
    is_inside: bool
    # Stretches free since the turn before, each to be held first
    refills: tuple[Filler, ...] = ()
    # To make then, one after the other. Their places are freed at last.
    openings: tuple[Opening, ...] = ()


@dataclass(frozen=True)
class Script:
    """The fillers of a step."""

    # height_bytes, lower_bound_bytes: of the arena it needs, and the largest load in it
    height_bytes: int
    lower_bound_bytes: int
    outside_bytes: int  # the most that the step holds outside of it at one time
    peak_bytes: int  # the most that it holds at one time in both
    places: tuple[int, ...]  # of each block
    # By the number of the instruction. Before the first, filler 0 holds everything.
    turns: Mapping[int, Turn]

    @property
    def requests(self) -> int:
        """How many blocks have a place."""
        return len(self.places)

    @property
    def everything(self) -> Filler:
        """Fillers that hold all of it before the step begins."""
        return Filler(0, 0, self.height_bytes)


def script_of_plan(
    graph: Graph, plan: Plan, *, with_gradients: bool, elsewhere: Iterable[int] = ()
) -> Script:
    """Lay a plan out and return its fillers.

    Small blocks are elsewhere. So is everything that an op requests of which a large output may
    outlive the step: outputs for the caller, and gradients if they are not to be inside. Memory of
    user code within the step comes in addition to the arena, all of which is held then.

    `with_gradients`: whether gradients that the plan hands over are inside. `elsewhere`: further
    instructions whose requests are elsewhere.
    """
    lives = sorted(
        lives_of(graph, plan),
        key=lambda life: (life.lower, life.value is None, life.value),  # as they are requested
    )
    fates = {"none", "written_back", "handed_over"} if with_gradients else {"none", "written_back"}
    large = [life for life in lives if life.size_bytes > SMALL_BYTES and life.op is not None]
    leaving = {2 * instruction for instruction in elsewhere} | {
        life.lower
        for life in large
        if life.value is not None and graph.values[life.value].fate not in fates
    }
    inside = [life for life in large if life.lower not in leaving]
    placed = {id(life) for life in inside}
    outside = [life for life in lives if id(life) not in placed]
    return script_of(
        _blocks(inside),
        outside_bytes=largest_load(_blocks(outside)),
        peak_bytes=largest_load(_blocks(lives)),
        outside_at=tuple(sorted({tick // 2 for tick in leaving})),
    )


def _blocks(lives: Iterable[Life]) -> list[Block]:
    return [Block(n, life.lower, life.upper, life.size_bytes) for n, life in enumerate(lives)]


def script_of(
    blocks: Sequence[Block],
    *,
    outside_bytes: int = 0,
    peak_bytes: int = 0,
    outside_at: Sequence[int] = (),
) -> Script:
    """Lay blocks out whose ticks are twice the numbers of instructions; return their fillers.

    `blocks`: larger than `SMALL_BYTES` each. `outside_bytes`, `peak_bytes`: the most that the step
    holds elsewhere, and in all. `outside_at`: instructions whose large requests are elsewhere.
    """
    rooms = _rooms(blocks)
    reserved = [
        Block(block.id, block.lower, block.upper, cells)
        for block, (_, cells) in zip(blocks, rooms, strict=True)
    ]
    packed = pack(reserved, alignment_bytes=CELL_BYTES)
    places = packed.layout.offsets
    spans = [(at, at + size) for at, (size, _) in zip(places, rooms, strict=True)]
    return Script(
        height_bytes=packed.height_bytes,
        lower_bound_bytes=largest_load(blocks, GRANULARITY_BYTES),
        outside_bytes=outside_bytes,
        peak_bytes=peak_bytes,
        places=places,
        turns=MappingProxyType(
            {number: Turn(is_inside=False) for number in outside_at}
            | _turns(blocks, spans, packed.height_bytes)
        ),
    )


def _rooms(blocks: Sequence[Block]) -> list[tuple[int, int]]:
    """Return for each block how much is opened, and in how many bytes of cells; the rest is filled.

    A rest that would be small goes along. Blocks of one instruction differ in opened bytes, so that
    they take their places in the order in which they are requested: the smallest that fits is taken
    first. Between them something stays filled: two free stretches that touch are one.
    """
    born = Counter(block.lower for block in blocks)
    used: set[tuple[int, int]] = set()
    rooms: list[tuple[int, int]] = []
    for block in blocks:
        size = block.rounded_bytes(GRANULARITY_BYTES)
        while (block.lower, size) in used:
            size += GRANULARITY_BYTES
        used.add((block.lower, size))
        cells = rounded_up(size, CELL_BYTES)
        if cells - size > SMALL_BYTES:
            rooms.append((size, cells))
        elif born[block.lower] == 1:
            rooms.append((cells, cells))
        else:
            rooms.append((size, cells + CELL_BYTES))
    return rooms


def _turns(
    blocks: Sequence[Block], spans: Sequence[tuple[int, int]], height_bytes: int
) -> dict[int, Turn]:
    """Return stretches held and opened before each instruction that requests a block."""
    turns: dict[int, Turn] = {}
    held = [Filler(0, 0, height_bytes)]
    numbers = itertools.count(1)
    pairs = list(zip(blocks, spans, strict=True))
    for tick in sorted({block.lower for block in blocks}):
        alive = [span for block, span in pairs if block.lower < tick < block.upper]
        gaps = _gaps(height_bytes, [*alive, *map(_span, held)])
        refills = tuple(Filler(next(numbers), a, b - a) for a, b in gaps)
        held = sorted([*held, *refills], key=_span)
        openings: list[Opening] = []
        for stretch, places in _stretches(held, [s for b, s in pairs if b.lower == tick]):
            pieces = _divided(stretch, places, numbers)
            openings.append(
                Opening(tuple(f.number for f in stretch if f.number is not None), pieces)
            )
            held = [filler for filler in held if filler not in stretch]
            held = sorted([*held, *(f for f in pieces if f.number is not None)], key=_span)
        turns[tick // 2] = Turn(True, refills, tuple(openings))
    return turns


def _stretches(
    held: Sequence[Filler], places: Sequence[tuple[int, int]]
) -> list[tuple[list[Filler], list[tuple[int, int]]]]:
    """Return the fillers that cover places, side by side, and the places in each such stretch.

    Where the rest next to a place would be small, the filler beyond goes along.
    """
    found: list[tuple[list[Filler], list[tuple[int, int]]]] = []
    for begin, end in sorted(places):
        low = next(n for n, filler in enumerate(held) if begin < filler.end)
        high = next(n for n, filler in enumerate(held) if end <= filler.end)
        while 0 < begin - held[low].offset <= SMALL_BYTES and low > 0:
            low -= 1
        while 0 < held[high].end - end <= SMALL_BYTES and high + 1 < len(held):
            high += 1
        own = list(held[low : high + 1])
        if found and own[0] in found[-1][0]:
            before, known = found.pop()
            own, known = [*before, *(f for f in own if f not in before)], [*known, (begin, end)]
            found.append((own, known))
        else:
            found.append((own, [(begin, end)]))
    return found


def _divided(
    stretch: Sequence[Filler], places: Sequence[tuple[int, int]], numbers: Iterator[int]
) -> tuple[Filler, ...]:
    """Return the pieces of a stretch: places, and fillers around them."""
    pieces: list[Filler] = []
    at = stretch[0].offset
    for begin, end in places:
        if at < begin:
            pieces.append(Filler(next(numbers), at, begin - at))
        pieces.append(Filler(None, begin, end - begin))
        at = end
    if at < stretch[-1].end:
        pieces.append(Filler(next(numbers), at, stretch[-1].end - at))
    return tuple(pieces)


def _span(filler: Filler) -> tuple[int, int]:
    return filler.offset, filler.end


def _gaps(height_bytes: int, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the stretches below a height that no span covers."""
    gaps: list[tuple[int, int]] = []
    at = 0
    for begin, end in sorted(spans):
        if at < begin:
            gaps.append((at, begin))
        at = max(at, end)
    return [*gaps, (at, height_bytes)] if at < height_bytes else gaps
