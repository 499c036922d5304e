"""The sets of values that may be kept of a segment of a chain, from all to none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tightfit.planners.anytime.segments import ChainSegment, ChainSplitter

_MOST_OPTIONS = 12
_NEVER = 1e300
_MOST_NEEDED = 60  # ops kept one by one; beyond, only all or nothing is offered


@dataclass(frozen=True)
class KeepOption:
    """Ops whose values are kept, their bytes, and the cost of forward pass and recomputation."""

    size_bytes: int
    cost: float
    ops: frozenset[int]


class KeepLists:
    """Keep options of segments; segments that look the same share them."""

    def __init__(self, splitter: ChainSplitter) -> None:
        self.splitter = splitter
        self.known: dict[object, tuple[int, tuple[list[KeepOption], list[KeepOption]]]] = {}

    def of(
        self, segment: ChainSegment, leaving: tuple[int, ...]
    ) -> tuple[list[KeepOption], list[KeepOption]]:
        """Return options that may read the segment's entry again, and options that need not."""
        key = self._signature(segment, leaving)
        if key in self.known:
            start, lists = self.known[key]
            shift = segment.start - start
            return _shifted(lists[0], shift), _shifted(lists[1], shift)
        lists = self._open(segment, leaving), self._closed(segment, leaving)
        self.known[key] = segment.start, lists
        return lists

    def _signature(self, segment: ChainSegment, leaving: tuple[int, ...]) -> object:
        """Equal for segments that differ only in their position."""
        splitter, start = self.splitter, segment.start
        return (
            tuple(
                (
                    splitter.bytes[op],
                    splitter.relaxed.first_cost[op],
                    tuple(source - start for source in splitter.reads[op]),
                )
                for op in range(start, segment.end)
            ),
            tuple(sorted((op - start, splitter.bytes[op]) for op in segment.needed)),
            tuple(op - start for op in leaving),
            tuple(op - start for op in segment.entry),
        )

    def _open(self, segment: ChainSegment, leaving: tuple[int, ...]) -> list[KeepOption]:
        splitter = self.splitter
        needed = [op for op in segment.needed if op >= segment.start]
        available = {*segment.entry, *leaving}

        def again(kept: set[int]) -> float:
            return splitter.cost(splitter.closure(needed, available | kept))

        start = {op for op in needed if op not in leaving}
        return self._descend(start, again, segment, leaving)

    def _closed(self, segment: ChainSegment, leaving: tuple[int, ...]) -> list[KeepOption]:
        splitter = self.splitter
        held = set(leaving)

        def again(kept: set[int]) -> float:
            ops = splitter.closure(segment.needed, held | kept)
            return splitter.cost(ops) if all(op >= segment.start for op in ops) else _NEVER

        start = {op for op in segment.needed if op not in leaving}
        return self._descend(start, again, segment, leaving)

    def _descend(
        self,
        start: set[int],
        again: Callable[[set[int]], float],
        segment: ChainSegment,
        leaving: tuple[int, ...],
    ) -> list[KeepOption]:
        """Stop keeping one op after the other, that whose bytes cost least first."""
        splitter = self.splitter
        free = {op for op in start if splitter.bytes[op] == 0}
        kept = start - free
        if len(kept) > _MOST_NEEDED:
            kept = set(sorted(kept, key=lambda op: -splitter.bytes[op])[:_MOST_NEEDED])
        options: list[KeepOption] = []
        cost: float = again(kept | free)
        while cost < _NEVER:
            own = [op for op in kept if op >= segment.start]
            forward = splitter.closure([*leaving, *own], set(segment.entry))
            size = sum(splitter.bytes[op] for op in kept)
            total = splitter.cost(forward) + cost
            options.append(KeepOption(size, total, frozenset(kept | free)))
            if not kept:
                break
            dearer: dict[int, float] = {op: again((kept | free) - {op}) for op in kept}
            rise = {op: (more - cost) / splitter.bytes[op] for op, more in dearer.items()}
            least = min(sorted(kept), key=rise.__getitem__)
            kept = kept - {least}
            cost = dearer[least]
        return _thinned(options)


def _thinned(options: list[KeepOption]) -> list[KeepOption]:
    """The Pareto front, without the points that add least to it."""
    front: list[KeepOption] = []
    for option in sorted(options, key=lambda option: (option.size_bytes, option.cost)):
        if not front or option.cost < front[-1].cost:
            front.append(option)

    def area(k: int) -> float:
        """How much worse the front is without its point k, as bytes times cost."""
        left, option, right = front[k - 1 : k + 2]
        return (option.size_bytes - left.size_bytes) * (left.cost - right.cost)

    while len(front) > _MOST_OPTIONS:
        front.pop(min(range(1, len(front) - 1), key=area))
    return front


def _shifted(options: list[KeepOption], shift: int) -> list[KeepOption]:
    return [
        KeepOption(option.size_bytes, option.cost, frozenset(op + shift for op in option.ops))
        for option in options
    ]
