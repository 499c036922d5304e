"""The view of a problem for mathematical programs: common to all ways to compute an op."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from tightfit.planners.engine.problem import EngineAlternative, EngineProblem

_ROUNDING = 1e-9  # of overheads: costs are whole units


@dataclass(frozen=True)
class RelaxedProblem:
    """A problem relaxed to facts that hold for every plan; ops and values are the engine's."""

    problem: EngineProblem  # the problem itself
    # first_reads, again_reads: per op: the values that every way of its first (a later) computation
    # reads
    first_reads: tuple[tuple[int, ...], ...]
    again_reads: tuple[tuple[int, ...], ...]
    # first_cost, again_cost: per op: the least cost of its first (a later) computation
    first_cost: tuple[int, ...]
    again_cost: tuple[int, ...]
    recomputable: tuple[bool, ...]  # per op
    rewritable: tuple[bool, ...]  # per value: whether computing its op again may make it again
    # Per value: the last op that may read it, the last of all if an op that reads it may be
    # computed again; its producer if none
    last_reader: tuple[int, ...]

    @property
    def ops(self) -> int:
        """The number of ops, crossings included."""
        return len(self.first_reads)

    def first_alternatives(self, op: int) -> list[tuple[int, EngineAlternative]]:
        """The ways of the first computation, with their numbers in the engine."""
        return [(k, way) for k, way in enumerate(self.problem.alternatives[op]) if way.first]

    def has_choice(self, op: int) -> bool:
        """Whether the ways of the first computation differ in their inputs."""
        return len({frozenset(way.reads) for _, way in self.first_alternatives(op)}) > 1

    def running(self, op: int) -> list[tuple[int, int, int]]:
        """The ways to run a first computation: alternative, cost, bytes it makes and works with.

        A way is left out if another way with the same inputs costs no more and needs no more bytes.
        """
        reads: dict[frozenset[int], list[tuple[int, int, int]]] = defaultdict(list)
        for number, way in self.first_alternatives(op):
            made = sum(self.problem.sizes[v] for v in way.writes)
            own = [(cost, made + size, number) for cost, size in way.options]
            reads[frozenset(way.reads)] += own
        kept: list[tuple[int, int, int]] = []
        for options in reads.values():
            least = math.inf
            for cost, size, number in sorted(options):
                if size < least:
                    kept.append((number, cost, size))
                    least = size
        return kept

    def again_alternatives(self, op: int) -> list[tuple[int, EngineAlternative]]:
        """The ways of a later computation, with their numbers in the engine."""
        return [(k, way) for k, way in enumerate(self.problem.alternatives[op]) if way.again]

    def reads_again(self, op: int, way: EngineAlternative) -> tuple[int, ...]:
        """Inputs of a way of a later computation; values of its own exist if it is taken."""
        return tuple(v for v in way.reads if self.problem.producers[v] != op)

    def has_choice_again(self, op: int) -> bool:
        """Whether the ways of a later computation differ in their inputs."""
        ways = self.again_alternatives(op)
        return len({frozenset(self.reads_again(op, way)) for _, way in ways}) > 1

    @cached_property
    def has_choices(self) -> bool:
        """Whether the ways of any first computation differ in their inputs."""
        return any(self.has_choice(op) for op in range(self.ops))

    @cached_property
    def trivial_bound(self) -> float:
        """The overhead (a fraction) of ops that must run, once, each by its cheapest way."""
        costs = zip(self.first_cost, self.problem.required, strict=True)
        least = sum(cost for cost, required in costs if required)
        return self.problem.overhead(least) - _ROUNDING

    def kept(self, value: int, stage: int) -> bool:
        """Whether a value is resident at the start of a stage in every schedule."""
        return self.problem.producers[value] < stage <= self.problem.kept_until[value]


def relaxed(problem: EngineProblem) -> RelaxedProblem:
    first = [[way for way in ways if way.first] for ways in problem.alternatives]
    again = [[way for way in ways if way.again] for ways in problem.alternatives]
    last = list(problem.producers)
    for op, ways in enumerate(problem.alternatives):
        for way in ways:
            for value in way.reads:
                again_later = way.again and problem.producers[value] != op
                last[value] = max(last[value], len(problem.alternatives) - 1 if again_later else op)
    rewritten = {value for ways in again for way in ways for value in way.writes}
    return RelaxedProblem(
        problem=problem,
        first_reads=tuple(_common_reads(ways) for ways in first),
        again_reads=tuple(
            tuple(v for v in _common_reads(ways) if problem.producers[v] != op)
            for op, ways in enumerate(again)
        ),
        first_cost=tuple(min(way.cost for way in ways) for ways in first),
        again_cost=tuple(min((way.cost for way in ways), default=0) for ways in again),
        recomputable=tuple(bool(ways) for ways in again),
        rewritable=tuple(value in rewritten for value in range(len(problem.sizes))),
        last_reader=tuple(last),
    )


def _common_reads(ways: Iterable[EngineAlternative]) -> tuple[int, ...]:
    sets = [set(way.reads) for way in ways]
    return tuple(sorted(set[int].intersection(*sets))) if sets else ()
