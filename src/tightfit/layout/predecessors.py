"""Which earlier block may still hold the bytes of a block when it is requested."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


def predecessors(sizes: Sequence[int], offsets: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return for each request those planned last before it over each of its bytes.

    If every earlier request is in its place or was freed, only these can be in the way.

    `sizes`, `offsets`: bytes of each request, in the order of requests; a negative offset: it is
    elsewhere.
    """
    begins: list[int] = []  # disjoint intervals from the lowest up: where each begins and ends,
    ends: list[int] = []  # and the block planned there last
    owners: list[int] = []
    found: list[tuple[int, ...]] = []
    for request, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        if offset < 0 or size <= 0:
            found.append(())
            continue
        top = offset + size
        first, last = bisect_right(ends, offset), bisect_left(begins, top)
        found.append(tuple(sorted(set(owners[first:last]))))
        kept: list[tuple[int, int, int]] = [(offset, top, request)]
        if first < last and begins[first] < offset:
            kept.insert(0, (begins[first], offset, owners[first]))
        if first < last and ends[last - 1] > top:
            kept.append((top, ends[last - 1], owners[last - 1]))
        begins[first:last] = [begin for begin, _, _ in kept]
        ends[first:last] = [end for _, end, _ in kept]
        owners[first:last] = [owner for _, _, owner in kept]
    return tuple(found)
