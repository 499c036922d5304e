"""Seeds for long chains: recursive checkpointing over segments of the forward pass.

The forward pass is cut where few bytes cross. A table over (first segment, last segment, memory)
decides which values to store at each cut and to keep of each segment (docs/search.md, "Chains").
Its view of memory is rough, so it is given more or less than the budget and the search repairs its
schedules. Ops represent the values they make; ops and stages are the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from tightfit._core import _engine
from tightfit.planners.anytime.keep import KeepLists, KeepOption
from tightfit.planners.anytime.segments import ChainSegment, ChainSplitter

Range = tuple[int, int, int]  # value, first stage, last stage

UNITS = 600  # resolution of memory
SWEEP = tuple(
    (most, optimism) for optimism in (1.1, 1.0, 1.2, 1.4, 1.7) for most in (15, 30, 60, 8, 22, 45)
)
_STORE, _LEAF, _KEEP, _KEEP_CLOSED = -3, -1, 10_000, 20_000
_FORWARD = -1  # the time of the first forward pass; else a backward stage


class Split:
    """The forward pass in segments; gives the schedule that the table chooses for a budget.

    `splitter`: where the forward pass may be cut. `keep_lists`: values that may be kept of a
    segment; shared by all splits of one splitter.
    """

    def __init__(self, splitter: ChainSplitter, keep_lists: KeepLists, most: int) -> None:
        self.splitter = splitter
        self.bounds = splitter.cuts(most)
        self.segments = list(self._segments())
        self.options: list[tuple[list[KeepOption], list[KeepOption]]] = [
            keep_lists.of(segment, self._leaving(k)) for k, segment in enumerate(self.segments)
        ]

    def _segments(self) -> Iterator[ChainSegment]:
        splitter, bounds = self.splitter, self.bounds
        count = len(bounds) - 1
        segment_of = [k for k in range(count) for _ in range(bounds[k], bounds[k + 1])]
        stages: list[list[int]] = [[] for _ in range(count)]
        furthest = 0
        for stage in range(splitter.relaxed.ops - 1, splitter.forward - 1, -1):
            sources = [s for s in splitter.reads[stage] if s < splitter.forward]
            furthest = max([furthest, *(segment_of[s] for s in sources)])
            stages[furthest].append(stage)
        following = splitter.forward
        made: list[ChainSegment] = []
        for k in range(count - 1, -1, -1):
            first = min(stages[k], default=following)
            last = max(stages[k], default=following - 1)
            following = last + 1
            start = bounds[k]
            entry = tuple(op for op in range(start) if splitter.last_forward[op] >= start)
            wanted = {*range(start, bounds[k + 1]), *entry}
            needed = MappingProxyType(
                {
                    source: stage
                    for stage in range(first, last + 1)
                    for source in splitter.reads[stage]
                    if source in wanted
                }
            )
            made.append(ChainSegment(start, bounds[k + 1], first, last, entry, needed))
        return reversed(made)

    def _leaving(self, k: int) -> tuple[int, ...]:
        """Ops of a segment whose values the next segment's entry holds."""
        if k + 1 == len(self.segments):
            return ()
        start = self.segments[k].start
        return tuple(op for op in self.segments[k + 1].entry if op >= start)

    def ranges(self, budget_bytes: float) -> list[Range] | None:
        """Return residency for a budget in bytes, or None if the table finds no way."""
        unit = max(1.0, budget_bytes / UNITS)
        table = _engine.ChainTable(
            [self._chain_segment(k, unit) for k in range(len(self.segments))],
            self._boundary_units(unit),
            UNITS,
        )
        last = len(self.segments) - 1
        if table.cost(True, 0, last, UNITS) >= 1e299:
            return None
        return _Expansion(self, table, unit).ranges()

    def boundary_bytes(self, k: int, following: int) -> int:
        """Bytes at the start of a later segment that are made after the start of segment k."""
        start = self.segments[k].start
        return sum(self.splitter.bytes[op] for op in self.segments[following].entry if op >= start)

    def _boundary_units(self, unit: float) -> list[int]:
        count = len(self.segments)
        return [
            _rounded(self.boundary_bytes(k, following), unit) if k < following < count else 0
            for k in range(count)
            for following in range(count + 1)
        ]

    def _chain_segment(self, k: int, unit: float) -> _engine.ChainSegment:
        splitter, segment = self.splitter, self.segments[k]
        own = {op: last for op, last in segment.needed.items() if op >= segment.start}
        gradients = splitter.gradient_bytes
        backward = max(
            (
                gradients[stage] + sum(splitter.bytes[op] for op, at in own.items() if at >= stage)
                for stage in range(segment.first, segment.last + 1)
            ),
            default=0,
        )
        entry = sum(splitter.bytes[op] for op in segment.needed if op < segment.start)
        at_start = 0
        if segment.first <= segment.last:
            at_start = max(0, gradients[segment.first] - splitter.bytes[segment.first])
        leaving = set(self._leaving(k))
        available = set(segment.entry)
        inner = splitter.closure(own, available | leaving)
        options, closed = self.options[k]
        return _engine.ChainSegment(
            splitter.cost(splitter.closure(leaving, available)),
            splitter.cost(inner),
            _rounded_up(backward, unit),
            _rounded(entry, unit),
            _rounded_up(self._forward_bytes(segment, leaving), unit),
            _rounded_up(at_start, unit),
            [(_rounded(option.size_bytes, unit), option.cost) for option in options],
            [(_rounded(option.size_bytes, unit), option.cost) for option in closed],
        )

    def _forward_bytes(self, segment: ChainSegment, leaving: set[int]) -> int:
        """Peak of the values a forward pass over the segment makes."""
        splitter = self.splitter
        ends: dict[int, int] = {}
        live = peak = 0
        for op in range(segment.start, segment.end):
            live += splitter.bytes[op]
            peak = max(peak, live)
            if op not in leaving:
                last = splitter.last_forward[op]
                ends[last] = ends.get(last, 0) + splitter.bytes[op]
            live -= ends.get(op, 0)
        return peak


def _rounded(size: float, unit: float) -> int:
    return min(UNITS + 1, int(size / unit + 0.5))


def _rounded_up(size: float, unit: float) -> int:
    return min(UNITS + 1, -int(-size // unit))


class _Expansion:
    """Follows the table's decisions and writes down which values are resident when."""

    def __init__(self, split: Split, table: _engine.ChainTable, unit: float) -> None:
        self.split = split
        self.splitter = split.splitter
        self.table = table
        self.unit = unit
        self.found: list[Range] = []

    def ranges(self) -> list[Range]:
        splitter = self.splitter
        for op in range(splitter.relaxed.ops):
            forward = op < splitter.forward
            self.hold(op, _FORWARD, splitter.last_forward[op] if forward else splitter.last[op])
        last = len(self.split.segments) - 1
        waiting = [(True, 0, last, UNITS, _FORWARD)]
        while waiting:
            waiting.extend(self.follow(*waiting.pop()))
        return self.found

    def follow(
        self, stored: bool, first: int, last: int, units: int, when: int
    ) -> list[tuple[bool, int, int, int, int]]:
        """Apply the decision for segments first..last; return the segments left to decide."""
        segments, split = self.split.segments, self.split
        decision = self.table.decision(stored, first, last, units)
        if decision == _LEAF:
            whole = last == len(segments) - 1 and when == _FORWARD
            self.hold_needed(first, when if whole else segments[first].first)
            return []
        if decision == _STORE:
            self.store(first, when)
            rest = units - _rounded(split.boundary_bytes(first - 1, first), self.unit)
            return [(True, first, last, rest, when)]
        if decision >= _KEEP:
            closed = decision >= _KEEP_CLOSED
            option = split.options[first][closed][decision % _KEEP]
            for op, at in segments[first].needed.items():
                if op in option.ops:
                    self.hold(op, when, at)
                elif op >= segments[first].start:
                    self.hold(op, segments[first].first, at)
            rest = units - _rounded(option.size_bytes, self.unit)
            return [(False, first + 1, last, rest, when)]
        self.store(decision, when)
        rest = units - _rounded(split.boundary_bytes(first, decision), self.unit)
        back = segments[decision - 1].first
        return [(True, decision, last, rest, when), (True, first, decision - 1, units, back)]

    def hold(self, op: int, when: int, until: int) -> None:
        """Keep the values that an op makes from a time to a stage."""
        start = op + 1 if when == _FORWARD else when + 1
        if until >= start:
            self.found.extend((value, start, until) for value in self.splitter.writes[op])

    def hold_needed(self, k: int, when: int) -> None:
        """Keep the values that the segment's backward stages read."""
        segment = self.split.segments[k]
        for op, at in segment.needed.items():
            if op >= segment.start or when == _FORWARD:
                self.hold(op, when, at)

    def store(self, k: int, when: int) -> None:
        """Keep the values at the start of a segment until its backward stages are done."""
        segments = self.split.segments
        for op in segments[k].entry:
            before = segments[k - 1].needed.get(op, 0) if k > 0 else 0
            self.hold(op, when, max(segments[k].last, before))
