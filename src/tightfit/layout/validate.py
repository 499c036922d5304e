"""Judge a layout by itself: knows no packer, shares no code with any."""

from __future__ import annotations

from bisect import bisect_left, insort

from tightfit.errors import InvalidLayout
from tightfit.layout.blocks import Layout


def validate_layout(layout: Layout) -> int:
    """Check a layout block by block, in the order of time.

    Returns its height in bytes, counted here. Raises `InvalidLayout` if an offset is missing,
    negative or not aligned, two blocks share an id, or two blocks that live at the same time share
    a byte.
    """
    _check_numbers(layout)
    height = 0
    living: list[tuple[int, int, int]] = []  # first byte, byte after the last, position
    for _, is_birth, position in _events(layout):
        first = layout.offsets[position]
        last = first + _taken(layout, position)
        if not is_birth:
            del living[bisect_left(living, (first, last, position))]
            continue
        place = bisect_left(living, (first, last, position))
        for _, end, other in living[max(0, place - 1) : place]:
            if end > first:
                raise InvalidLayout(_overlap(layout, other, position))
        for begin, _, other in living[place : place + 1]:
            if begin < last:
                raise InvalidLayout(_overlap(layout, other, position))
        insort(living, (first, last, position))
        height = max(height, last)
    return height


def _check_numbers(layout: Layout) -> None:
    if len(layout.offsets) != len(layout.blocks):
        raise InvalidLayout(
            f"the layout has {len(layout.offsets)} offsets for {len(layout.blocks)} blocks"
        )
    if layout.alignment_bytes < 1:
        raise InvalidLayout(f"an alignment of {layout.alignment_bytes} bytes is none")
    seen: set[int] = set()
    for block, offset in zip(layout.blocks, layout.offsets, strict=True):
        if block.id in seen:
            raise InvalidLayout(f"two blocks have the id {block.id}")
        seen.add(block.id)
        if offset < 0 or offset % layout.alignment_bytes:
            raise InvalidLayout(
                f"block {block.id} is at {offset}: offsets are multiples of "
                f"{layout.alignment_bytes} from 0 on"
            )


def _events(layout: Layout) -> list[tuple[int, bool, int]]:
    """Births and deaths in the order of time; at equal ticks deaths come first."""
    events: list[tuple[int, bool, int]] = []
    for position, block in enumerate(layout.blocks):
        if block.lower < block.upper and block.size_bytes > 0:
            events += [(block.lower, True, position), (block.upper, False, position)]
    return sorted(events)


def _taken(layout: Layout, position: int) -> int:
    size = layout.blocks[position].size_bytes
    return -(-size // layout.alignment_bytes) * layout.alignment_bytes


def _overlap(layout: Layout, one: int, other: int) -> str:
    both = [
        f"{layout.blocks[p].id} (bytes {layout.offsets[p]} to "
        f"{layout.offsets[p] + _taken(layout, p)}, ticks {layout.blocks[p].lower} to "
        f"{layout.blocks[p].upper})"
        for p in (one, other)
    ]
    return f"blocks {both[0]} and {both[1]} share bytes while both are alive"
