"""Cuts of the forward pass of a step, and the segments between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from tightfit.planners.anytime.relaxation import RelaxedProblem

_WINDOW = 2  # a cut is a local minimum of the bytes crossing it within so many ops


class ChainSplitter:
    """The part of the splitting that is the same for every number of segments.

    `forward`: ops before this op are the forward pass.
    """

    def __init__(self, relaxed: RelaxedProblem, forward: int) -> None:
        problem = relaxed.problem
        self.relaxed = relaxed
        self.forward = forward
        self.writes = [
            tuple(dict.fromkeys(v for way in ways if way.first for v in way.writes))
            for ways in problem.alternatives
        ]
        self.bytes = [sum(problem.sizes[v] for v in writes) for writes in self.writes]
        self.reads = [
            tuple(sorted({problem.producers[v] for v in reads} - {op}))
            for op, reads in enumerate(relaxed.first_reads)
        ]
        self.last = list(range(relaxed.ops))
        self.last_forward = list(range(forward))
        for op, reads in enumerate(self.reads):
            for source in reads:
                self.last[source] = max(self.last[source], op)
                if op < forward:
                    self.last_forward[source] = max(self.last_forward[source], op)
        self.crossing = self._crossing_bytes()
        self.gradient_bytes = self._gradient_bytes()

    def _crossing_bytes(self) -> list[int]:
        """Bytes of forward values that are made before each op and read by this op or later ops."""
        change = [0] * (self.forward + 2)
        for op, last in enumerate(self.last_forward):
            if last > op:
                change[op + 1] += self.bytes[op]
                change[last + 1] -= self.bytes[op]
        return list(accumulate(change))[: self.forward + 1]

    def _gradient_bytes(self) -> list[int]:
        """Bytes of backward values alive while each op runs, with nothing recomputed."""
        change = [0] * (self.relaxed.ops + 2)
        for op in range(self.forward, self.relaxed.ops):
            change[op] += self.bytes[op]
            change[self.last[op] + 1] -= self.bytes[op]
        return list(accumulate(change))[: self.relaxed.ops + 1]

    def closure(self, targets: Iterable[int], available: set[int]) -> set[int]:
        """Ops that have to run so that the targets are there."""
        queue = [op for op in targets if op not in available]
        found = set(queue)
        while queue:
            for source in self.reads[queue.pop()]:
                if source not in found and source not in available:
                    found.add(source)
                    queue.append(source)
        return found

    def cost(self, ops: Iterable[int]) -> float:
        return float(sum(self.relaxed.first_cost[op] for op in ops))

    def cuts(self, most: int) -> list[int]:
        """Bounds of at most so many segments, at local minima of the bytes that cross."""
        crossing, end = self.crossing, self.forward
        cuts: list[int] = []
        for at in range(1, end):
            near = crossing[max(1, at - _WINDOW) : min(end, at + _WINDOW + 1)]
            plateau = bool(cuts) and len(set(crossing[cuts[-1] : at + 1])) == 1
            if crossing[at] == min(near) and not plateau:
                cuts.append(at)
        bounds = [0, *cuts, end]
        before = list(accumulate(self.bytes[:end], initial=0))
        while len(bounds) - 1 > most:
            inner = range(1, len(bounds) - 1)
            bounds.pop(min(inner, key=lambda k: before[bounds[k + 1]] - before[bounds[k - 1]]))
        return bounds


@dataclass(frozen=True)
class ChainSegment:
    """A run of forward ops and the stretch of the backward pass that reads it."""

    # start, end: forward ops start to end - 1
    start: int
    end: int
    # first, last: its backward stages; empty if last < first
    first: int
    last: int
    entry: tuple[int, ...]  # ops before the segment whose values are still read in it or after it
    # Ops of the segment, or of its entry, that its backward stages read, with the last of them
    needed: Mapping[int, int]
