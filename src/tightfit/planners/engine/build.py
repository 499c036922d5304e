"""From a task to the engine's problem, and from an engine schedule back to computes.

The engine knows ops, values and ways to compute; everything else about a graph is expressed in
these: segment crossings become ops that cost nothing, the state of a random generator becomes a
value written by the first computation and read by later ones, constants leave the budget.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from tightfit._core import _engine
from tightfit.graph.ir import CONSTANT_ROLES, Op, OpId, SegmentId, ValueId
from tightfit.graph.liveness import computed_ops
from tightfit.plan.plan import Compute
from tightfit.plan.simulate import baseline_cost_s
from tightfit.planners.base import Task
from tightfit.planners.engine.recomputable import has_plain_twin, ways_again

__all__ = ["EngineProblem", "Way", "build_problem", "computes_of"]

_COST_UNITS = float(2**40)  # of the baseline: exact integers, a resolution of 1e-12
_CROSSING = -1


@dataclass(frozen=True)
class Way:
    """A way to compute an op, in the engine's numbers, for the mathematical programs.

    Parameters
    ----------
    reads, writes : tuple of int
        Values of the engine, without the states of random generators.
    cost : int
        The least cost of its variants.
    workspace_bytes : int
        The least workspace of its variants; negative by the bytes it may write in place.
    first, again : bool
        Whether it may serve the first computation, and later ones.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    cost: int
    workspace_bytes: int
    first: bool
    again: bool


@dataclass(frozen=True)
class EngineProblem:
    """A task as the engine sees it.

    Parameters
    ----------
    engine : tightfit._core._engine.Problem
        The problem itself.
    budget_bytes : int
        The task's budget without the constants.
    graph_ops : tuple of int
        For each op of the engine the op of the graph, -1 for a segment crossing.
    engine_ops : dict of int to int
        The engine's op for each op of the graph.
    engine_values : dict of int to int
        The engine's value for each value of the graph that is not constant.
    cost_unit_s : float
        Seconds of one unit of cost.
    baseline_cost : int
        Units of cost with nothing recomputed and default alternatives.
    sizes, producers, kept_until : tuple of int
        Per value of the engine: bytes, the op that makes it, the last stage at whose start it is
        resident whatever happens (-1: none).
    ways : tuple of tuple of Way
        Per op of the engine, in the engine's order of alternatives.
    required : tuple of bool
        Per op: whether it runs even if nobody reads what it makes.
    programs : tuple of int
        Per op: its program, -1 for a crossing.
    segments : tuple of int
        Per op: its segment.
    segment_programs : tuple of int
        Per segment of the graph: its program.
    choices : tuple
        Linked alternatives: choices of branches of (op, alternative of the engine).
    """

    engine: _engine.Problem
    budget_bytes: int
    graph_ops: tuple[OpId, ...]
    engine_ops: dict[OpId, int]
    engine_values: dict[ValueId, int]
    cost_unit_s: float
    baseline_cost: int
    sizes: tuple[int, ...]
    producers: tuple[int, ...]
    kept_until: tuple[int, ...]
    ways: tuple[tuple[Way, ...], ...]
    required: tuple[bool, ...]
    programs: tuple[int, ...]
    segments: tuple[SegmentId, ...]
    segment_programs: tuple[int, ...]
    choices: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]

    def overhead(self, cost: int) -> float:
        """Return a cost of the engine as a fraction above the baseline."""
        return cost / self.baseline_cost - 1.0 if self.baseline_cost else 0.0

    def cost_at(self, overhead: float) -> int:
        """Return the engine's cost of an overhead (a fraction)."""
        return int(self.baseline_cost * (1.0 + overhead))


@dataclass(frozen=True)
class _Family:
    """Alternatives of an op that read and write the same values, with their use in the engine."""

    reads: tuple[ValueId, ...]
    writes: tuple[ValueId, ...]
    first: bool
    again: bool
    members: tuple[int, ...]


def build_problem(task: Task, *, alternatives: bool = True) -> EngineProblem:
    """Return the engine's problem of a task.

    Parameters
    ----------
    task : Task
        Graph, budget in bytes, kind of gradients.
    alternatives : bool
        False: every first computation uses the default alternative.
    """
    return _Builder(task, alternatives).build()


def computes_of(problem: EngineProblem, schedule: _engine.Schedule) -> list[Compute]:
    """Return the computes of a schedule in order."""
    return [
        Compute(problem.graph_ops[op], alternative, variant)
        for op, alternative, variant in schedule.computes()
        if problem.graph_ops[op] != _CROSSING
    ]


class _Builder:
    def __init__(self, task: Task, alternatives: bool) -> None:
        self.task = task
        self.graph = task.graph
        self.alternatives = alternatives
        self.engine = _engine.Problem()
        self.graph_ops: list[OpId] = []
        self.engine_ops: dict[OpId, int] = {}
        self.engine_values: dict[ValueId, int] = {}
        self.ways_again = ways_again(self.graph)
        self.tangents: dict[SegmentId, list[ValueId]] = defaultdict(list)
        for value in self.graph.values:
            if value.role == "tangent" and value.segment is not None:
                self.tangents[value.segment].append(value.id)
        baseline_s = baseline_cost_s(self.graph)
        self.unit_s = baseline_s / _COST_UNITS if baseline_s > 0 else 1.0
        self.sizes: list[int] = []
        self.producers: list[int] = []
        self.kept_until: list[int] = []
        self.ways: list[list[Way]] = []
        self.required: list[bool] = []
        self.programs: list[int] = []
        self.segments: list[SegmentId] = []
        self.first_numbers: dict[tuple[OpId, int], int] = {}
        self.order = self._order()
        self.end = len(self.order)

    def build(self) -> EngineProblem:
        segment_end = self._segment_ends()
        read = {v for op in self.graph.ops for a in op.alternatives for v in a.reads}
        overwritten = {a.overwrites for op in self.graph.ops for a in op.alternatives}
        for position, (segment, op) in enumerate(self.order):
            if op is None:
                self._add_crossing(position, segment, read)
                continue
            self._add_op(position, op)
            self._add_outputs(position, op, segment_end[op.segment], overwritten)
            self._add_alternatives(position, op)
        if self.alternatives:
            for choice in self.choices():
                self.engine.add_choice(choice)
        self.engine.finish()
        return EngineProblem(
            engine=self.engine,
            budget_bytes=self.task.budget_bytes - self.graph.constant_bytes,
            graph_ops=tuple(self.graph_ops),
            engine_ops=self.engine_ops,
            engine_values=self.engine_values,
            cost_unit_s=self.unit_s,
            baseline_cost=self._baseline_cost(),
            sizes=tuple(self.sizes),
            producers=tuple(self.producers),
            kept_until=tuple(self.kept_until),
            ways=tuple(tuple(ways) for ways in self.ways),
            required=tuple(self.required),
            programs=tuple(self.programs),
            segments=tuple(self.segments),
            segment_programs=tuple(segment.program for segment in self.graph.segments),
            choices=self.choices() if self.alternatives else (),
        )

    def _baseline_cost(self) -> int:
        """What a step costs that recomputes nothing, the optional ops that it reads included."""
        return sum(
            min(self._cost(v.cost_s) for v in op.alternatives[0].variants)
            for op in computed_ops(self.graph)
        )

    def _order(self) -> list[tuple[SegmentId, Op | None]]:
        """Segment crossings that hold or make anything, and ops, in the order of the step."""
        by_segment: dict[SegmentId, list[Op]] = defaultdict(list)
        for op in self.graph.ops:
            by_segment[op.segment].append(op)
        order: list[tuple[SegmentId, Op | None]] = []
        for segment in self.graph.segments:
            if segment.outside_bytes or self.tangents[segment.id]:
                order.append((segment.id, None))
            order.extend((segment.id, op) for op in by_segment[segment.id])
        return order

    def _segment_ends(self) -> dict[SegmentId, int]:
        """The last position of each segment that has ops."""
        return {s: position for position, (s, op) in enumerate(self.order) if op is not None}

    def _cost(self, cost_s: float) -> int:
        return round(cost_s / self.unit_s) + 1  # one unit more, so that no computation is free

    def _add_crossing(self, position: int, segment: SegmentId, read: set[ValueId]) -> None:
        self.graph_ops.append(_CROSSING)
        self._add_engine_op(required=True, crossing=True, program=-1, segment=segment)
        first_compute = next(
            (p for p in range(position, self.end) if self.order[p][1] is not None), self.end
        )
        total = 0
        for value in self.tangents[segment]:
            size = self.graph.values[value].size_bytes
            total += size
            until = -1 if value in read else first_compute
            self._add_value(value, size, position, until)
        writes = [self.engine_values[v] for v in self.tangents[segment]]
        number = self.engine.add_alternative(position, [], writes, first=True, again=False)
        outside = self.graph.segments[segment].outside_bytes
        workspace = max(0, outside - total)
        self.engine.add_option(position, number, 0, workspace, -1, 0, 0)
        self.ways[position].append(Way((), tuple(writes), 0, workspace, True, False))

    def _add_engine_op(
        self, *, required: bool, crossing: bool, program: int, segment: SegmentId
    ) -> None:
        self.engine.add_op(required=required, crossing=crossing, program=program, segment=segment)
        self.segments.append(segment)
        self.ways.append([])
        self.required.append(required)
        self.programs.append(program)

    def _add_value(self, value: ValueId | None, size: int, producer: int, kept_until: int) -> int:
        """Add a value of the graph, or (None) the state of a random generator."""
        number = self.engine.add_value(size, producer, kept_until, state=value is None)
        self.sizes.append(size)
        self.producers.append(producer)
        self.kept_until.append(kept_until)
        if value is not None:
            self.engine_values[value] = number
        return number

    def _add_op(self, position: int, op: Op) -> None:
        self.graph_ops.append(op.id)
        self.engine_ops[op.id] = position
        program = self.graph.segments[op.segment].program
        self._add_engine_op(
            required=op.required, crossing=False, program=program, segment=op.segment
        )

    def _add_outputs(
        self, position: int, op: Op, segment_end: int, overwritten: set[ValueId | None]
    ) -> None:
        always = set[ValueId].intersection(
            *(set(a.writes) for a in op.alternatives if a.use != "again")
        )
        for value in dict.fromkeys(v for a in op.alternatives for v in a.writes):
            record = self.graph.values[value]
            until = -1
            fresh = self.task.gradients == "fresh"
            if record.fate == "returned" or (record.fate == "handed_over" and fresh):
                until = self.end
            elif record.fate == "written_back":
                until = segment_end
            elif record.size_bytes == 0 and op.required and value in always - overwritten:
                until = self.end
            self._add_value(value, record.size_bytes, position, until)

    def _families(self, op: Op) -> list[_Family]:
        grouped: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for number, alternative in enumerate(op.alternatives):
            first = alternative.use != "again" and (
                self.alternatives or self._is_default(op, number)
            )
            again = number in self.ways_again[op.id]
            target = alternative.overwrites
            if target is not None and has_plain_twin(op, alternative):
                target = None
            if first or again:
                key = (frozenset(alternative.reads), alternative.writes, first, again, target)
                grouped[key].append(number)
        return [
            _Family(
                op.alternatives[numbers[0]].reads,
                op.alternatives[numbers[0]].writes,
                bool(key[2]),
                bool(key[3]),
                tuple(numbers),
            )
            for key, numbers in grouped.items()
        ]

    def _is_default(self, op: Op, number: int) -> bool:
        """The default, or what differs from it only in writing over its input."""
        default, other = op.alternatives[0], op.alternatives[number]
        same = set(default.reads) == set(other.reads) and default.writes == other.writes
        return number == 0 or (same and other.use == default.use)

    def _add_alternatives(self, position: int, op: Op) -> None:
        families = self._families(op)
        state = -1
        if op.random_state_bytes and any(family.again for family in families):
            state = self._add_value(None, op.random_state_bytes, position, -1)
        for family in families:
            if state >= 0 and family.first and family.again:
                self._add_family(position, op, family, state, first=True)
                self._add_family(position, op, family, state, first=False)
            else:
                self._add_family(position, op, family, state, first=family.first)

    def _add_family(
        self, position: int, op: Op, family: _Family, state: int, *, first: bool
    ) -> None:
        reads = [self.engine_values[v] for v in family.reads if not self._is_constant(v)]
        writes = [self.engine_values[v] for v in family.writes]
        again = family.again and (state < 0 or not first)
        self.ways[position].append(self._way(op, family, reads, writes, first, again))
        if state >= 0:
            (writes if first else reads).append(state)
        number = self.engine.add_alternative(position, reads, writes, first=first, again=again)
        if first:
            self.first_numbers.update({(op.id, member): number for member in family.members})
        for member in family.members:
            alternative = op.alternatives[member]
            target = alternative.overwrites
            overwrites = -1 if target is None else self.engine_values[target]
            for index, variant in enumerate(alternative.variants):
                self.engine.add_option(
                    position,
                    number,
                    self._cost(variant.cost_s),
                    variant.workspace_bytes,
                    overwrites,
                    member,
                    index,
                )

    def choices(self) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
        """The graph's linked alternatives in the engine's numbers."""
        return tuple(
            tuple(
                tuple((self.engine_ops[op], self.first_numbers[op, way]) for op, way in branch)
                for branch in choice.branches
                if all(pair in self.first_numbers for pair in branch)
            )
            for choice in self.graph.choices
        )

    def _way(
        self, op: Op, family: _Family, reads: list[int], writes: list[int], first: bool, again: bool
    ) -> Way:
        variants = [
            (variant, 0 if target is None else self.graph.values[target].size_bytes)
            for target, variant in (
                (op.alternatives[member].overwrites, variant)
                for member in family.members
                for variant in op.alternatives[member].variants
            )
        ]
        return Way(
            reads=tuple(dict.fromkeys(reads)),
            writes=tuple(writes),
            cost=min(self._cost(variant.cost_s) for variant, _ in variants),
            workspace_bytes=min(variant.workspace_bytes - saved for variant, saved in variants),
            first=first,
            again=again,
        )

    def _is_constant(self, value: ValueId) -> bool:
        return self.graph.values[value].role in CONSTANT_ROLES
