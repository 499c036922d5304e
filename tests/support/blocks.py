"""Blocks for tests: random ones, perfect packings, and the least height by trying all orders."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from random import Random

from hypothesis import strategies as st

from tightfit.layout.blocks import Block

_ROOT = Path(__file__).parents[2]
_FOLDERS = [parent / "shared/data/blocks" for parent in (_ROOT.parent, _ROOT.parent.parent)]

TRACES = sorted(path for folder in _FOLDERS for path in folder.glob("*.csv*"))
"""Recorded steps and public instances next to the repository; none where they are absent."""


def some_blocks(
    most: int, *, ticks: int = 12, sizes: Sequence[int] = range(0, 9)
) -> st.SearchStrategy[tuple[Block, ...]]:
    """Draw blocks with any lifetimes."""
    times = st.tuples(st.integers(0, ticks), st.integers(1, ticks))
    drawn = st.lists(st.tuples(times, st.sampled_from(sizes)), max_size=most)
    return drawn.map(
        lambda rows: tuple(
            Block(number, lower, lower + length, size)
            for number, ((lower, length), size) in enumerate(rows)
        )
    )


@st.composite
def perfect_packings(draw: st.DrawFn, most: int) -> tuple[Block, ...]:
    """Draw blocks that fill a rectangle of 40 ticks and 60 bytes: it is cut again and again."""
    random = Random(draw(st.integers(0, 10**6)))
    pieces = [(0, 40, 0, 60)]
    for _ in range(draw(st.integers(0, most - 1))):
        begin, end, low, high = pieces.pop(random.randrange(len(pieces)))
        if end - begin > 1 and (random.random() < 0.5 or high - low == 1):
            cut = random.randint(begin + 1, end - 1)
            pieces += [(begin, cut, low, high), (cut, end, low, high)]
        elif high - low > 1:
            cut = random.randint(low + 1, high - 1)
            pieces += [(begin, end, low, cut), (begin, end, cut, high)]
        else:
            pieces.append((begin, end, low, high))
    random.shuffle(pieces)
    rows = [(begin, end, high - low) for begin, end, low, high in pieces]
    return tuple(Block(number, *row) for number, row in enumerate(rows))


@st.composite
def crowded_blocks(draw: st.DrawFn, most: int) -> tuple[Block, ...]:
    """Draw blocks under a load that is nearly full all the time: some need more than the load."""
    random = Random(draw(st.integers(0, 10**6)))
    ticks, capacity = random.choice([6, 8, 10, 12]), random.choice([6, 8, 10, 12])
    load = [0] * ticks
    blocks: list[Block] = []
    for _ in range(4 * most):
        lower = random.randrange(ticks)
        upper = random.randint(lower + 1, min(ticks, lower + 4))
        size = random.randint(1, capacity // 2)
        if len(blocks) < most and max(load[lower:upper]) + size <= capacity:
            load[lower:upper] = [taken + size for taken in load[lower:upper]]
            blocks.append(Block(len(blocks), lower, upper, size))
    return tuple(blocks)


def lowest_height(blocks: Sequence[Block]) -> int:
    """Return the least height of any layout, by dropping the blocks in every order.

    Any layout can be pushed down until each block rests on another one or on address 0; dropped
    from the lowest up, its blocks come to lie no higher.
    """
    return min((_dropped_height(order) for order in permutations(blocks)), default=0)


def _dropped_height(order: Sequence[Block]) -> int:
    placed: list[tuple[Block, int]] = []
    for block in order:
        tops = (
            top for other, top in placed if other.lower < block.upper and block.lower < other.upper
        )
        placed.append((block, max(tops, default=0) + block.size_bytes))
    return max((top for _, top in placed), default=0)
