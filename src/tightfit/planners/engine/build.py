"""From a task to the engine's problem.

The engine knows ops, values and ways to compute; everything else about a graph is expressed in
these. Segment crossings become ops that cost nothing. The state of a random generator becomes a
value that the first computation writes and later computations read. Constants leave the budget.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from tightfit._core import _engine
from tightfit.graph.ir import EXACTNESS, Exactness, Graph, Op, OpId, SegmentId, ValueId
from tightfit.graph.liveness import computed_ops, tangents
from tightfit.plan.simulate import baseline_cost_s
from tightfit.planners.base import Task
from tightfit.planners.engine.problem import CROSSING, EngineAlternative, EngineProblem
from tightfit.planners.engine.recomputable import has_plain_twin, ways_again

_COST_UNITS = float(2**40)  # of the baseline: exact integers, a resolution of 1e-12


def build_problem(
    task: Task, *, alternatives: bool = True, exactness: Exactness = "lossy"
) -> EngineProblem:
    """Return the engine's problem of a task.

    `task`: graph, budget in bytes, kind of gradients. `alternatives`: False: every first
    computation uses the default alternative. `exactness`: the least exact class that a first
    computation may take.
    """
    return _Builder(task, exactness if alternatives else None).build()


@dataclass(frozen=True)
class _Family:
    """Alternatives of an op that read and write the same values, with their use in the engine."""

    reads: tuple[ValueId, ...]
    writes: tuple[ValueId, ...]
    first: bool
    again: bool
    members: tuple[int, ...]


class _Record:
    """The engine's problem while it grows, and facts about it for Python."""

    def __init__(self) -> None:
        self.engine = _engine.Problem()
        self.graph_ops: list[OpId] = []
        self.segments: list[SegmentId] = []
        self.programs: list[int] = []
        self.required: list[bool] = []
        self.alternatives: list[list[EngineAlternative]] = []
        self.sizes: list[int] = []
        self.producers: list[int] = []
        self.kept_until: list[int] = []

    def add_op(self, graph_op: OpId, *, required: bool, program: int, segment: SegmentId) -> int:
        """Add an op, or a segment crossing; return its position."""
        crossing = graph_op == CROSSING
        self.engine.add_op(required=required, crossing=crossing, program=program, segment=segment)
        self.graph_ops.append(graph_op)
        self.segments.append(segment)
        self.programs.append(program)
        self.required.append(required)
        self.alternatives.append([])
        return len(self.graph_ops) - 1

    def add_value(
        self, size_bytes: int, producer: int, kept_until: int, *, state: bool = False
    ) -> int:
        """Add a value, or the state of a random generator; return its number."""
        self.sizes.append(size_bytes)
        self.producers.append(producer)
        self.kept_until.append(kept_until)
        return self.engine.add_value(size_bytes, producer, kept_until, state=state)

    def add_alternative(
        self,
        position: int,
        way: EngineAlternative,
        *,
        state_read: Sequence[int] = (),
        state_written: Sequence[int] = (),
    ) -> int:
        """Add a way to compute an op, with a generator's state where it needs one."""
        self.alternatives[position].append(way)
        reads, writes = [*way.reads, *state_read], [*way.writes, *state_written]
        return self.engine.add_alternative(
            position, reads, writes, first=way.first, again=way.again
        )


class _Builder:
    """Walks over the step and describes it to the engine."""

    def __init__(self, task: Task, exactness: Exactness | None) -> None:
        self.task = task
        self.graph = task.graph
        self.exactness: Exactness | None = exactness
        self.record = _Record()
        self.ways_again = ways_again(self.graph)
        self.tangents = tangents(self.graph)
        self.order = _order(self.graph, self.tangents)
        baseline_s = baseline_cost_s(self.graph)
        self.unit_s = baseline_s / _COST_UNITS if baseline_s > 0 else 1.0
        self.engine_ops: dict[OpId, int] = {}
        self.engine_values: dict[ValueId, int] = {}
        self.first_numbers: dict[tuple[OpId, int], int] = {}

    def build(self) -> EngineProblem:
        self._add_step()
        record = self.record
        choices = self._choices() if self.exactness is not None else ()
        for choice in choices:
            record.engine.add_choice(choice)
        record.engine.finish()
        return EngineProblem(
            engine=record.engine,
            budget_bytes=self.task.budget_bytes - self.graph.constant_bytes,
            graph_ops=tuple(record.graph_ops),
            engine_ops=MappingProxyType(self.engine_ops),
            engine_values=MappingProxyType(self.engine_values),
            cost_unit_s=self.unit_s,
            baseline_cost=self._baseline_cost(),
            sizes=tuple(record.sizes),
            producers=tuple(record.producers),
            kept_until=tuple(record.kept_until),
            alternatives=tuple(tuple(ways) for ways in record.alternatives),
            required=tuple(record.required),
            programs=tuple(record.programs),
            segments=tuple(record.segments),
            segment_programs=tuple(segment.program for segment in self.graph.segments),
            choices=choices,
            exactness=self.exactness,
        )

    def _add_step(self) -> None:
        """Add everything in the order of the step."""
        segment_end = {s: position for position, (s, op) in enumerate(self.order) if op is not None}
        read = {v for op in self.graph.ops for a in op.alternatives for v in a.reads}
        overwritten = {a.overwrites for op in self.graph.ops for a in op.alternatives}
        for segment, op in self.order:
            if op is None:
                self._add_crossing(segment, read)
                continue
            program = self.graph.segments[op.segment].program
            position = self.record.add_op(
                op.id, required=op.required, program=program, segment=op.segment
            )
            self.engine_ops[op.id] = position
            self._add_outputs(position, op, segment_end[op.segment], overwritten)
            self._add_alternatives(position, op)

    def _baseline_cost(self) -> int:
        """Cost of a step that recomputes nothing, the optional ops that it reads included."""
        return sum(self._cost(op.alternatives[0].least_cost_s) for op in computed_ops(self.graph))

    def _cost(self, cost_s: float) -> int:
        return round(cost_s / self.unit_s) + 1  # one unit more, so that no computation is free

    def _add_crossing(self, segment: SegmentId, read: set[ValueId]) -> None:
        """Add the entry of a segment: its tangents appear, user code holds its memory."""
        position = self.record.add_op(CROSSING, required=True, program=-1, segment=segment)
        end = len(self.order)
        first_compute = next((p for p in range(position, end) if self.order[p][1] is not None), end)
        appearing = self.tangents[segment]
        for value in appearing:
            until = -1 if value in read else first_compute
            self._add_value(value, position, until)
        outside_bytes = self.graph.segments[segment].outside_bytes
        workspace = max(0, outside_bytes - self.graph.bytes_of(appearing))
        way = EngineAlternative(
            reads=(),
            writes=tuple(self.engine_values[v] for v in appearing),
            options=((0, workspace),),
            first=True,
            again=False,
        )
        number = self.record.add_alternative(position, way)
        self.record.engine.add_option(position, number, 0, workspace, -1, 0, 0)

    def _add_value(self, value: ValueId, producer: int, kept_until: int) -> None:
        size = self.graph.values[value].size_bytes
        self.engine_values[value] = self.record.add_value(size, producer, kept_until)

    def _add_outputs(
        self, position: int, op: Op, segment_end: int, overwritten: set[ValueId | None]
    ) -> None:
        always = set[ValueId].intersection(
            *(set(a.writes) for a in op.alternatives if a.use != "again")
        )
        end = len(self.order)
        for value in dict.fromkeys(v for a in op.alternatives for v in a.writes):
            info = self.graph.values[value]
            until = -1
            if info.stays_to_end(self.task.gradients):
                until = end
            elif info.fate == "written_back":
                until = segment_end
            elif info.size_bytes == 0 and op.required and value in always - overwritten:
                until = end
            self._add_value(value, position, until)

    def _families(self, op: Op) -> list[_Family]:
        grouped: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for number, alternative in enumerate(op.alternatives):
            first = alternative.use != "again" and self._is_allowed(op, number)
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

    def _is_allowed(self, op: Op, number: int) -> bool:
        """Whether a first computation may take an alternative."""
        if self.exactness is None:
            return _is_default(op, number)
        return EXACTNESS.index(op.alternatives[number].exactness) <= EXACTNESS.index(self.exactness)

    def _add_alternatives(self, position: int, op: Op) -> None:
        """Add an op's families; with a generator's state, first and later ones apart."""
        families = self._families(op)
        if not (op.random_state_bytes and any(family.again for family in families)):
            for family in families:
                self._add_family(position, op, family)
            return
        state = [self.record.add_value(op.random_state_bytes, position, -1, state=True)]
        for family in families:
            if family.first:
                self._add_family(position, op, replace(family, again=False), written=state)
            if family.again:
                self._add_family(position, op, replace(family, first=False), read=state)

    def _add_family(
        self,
        position: int,
        op: Op,
        family: _Family,
        *,
        read: Sequence[int] = (),
        written: Sequence[int] = (),
    ) -> None:
        """Add one way to compute an op; `read` and `written`: the state of its generator."""
        way = self._alternative(op, family)
        number = self.record.add_alternative(position, way, state_read=read, state_written=written)
        if family.first:
            self.first_numbers.update({(op.id, member): number for member in family.members})
        for member, index in self._fitting(op, family):
            target = op.alternatives[member].overwrites
            variant = op.alternatives[member].variants[index]
            self.record.engine.add_option(
                position,
                number,
                self._cost(variant.cost_s),
                variant.workspace_bytes,
                -1 if target is None else self.engine_values[target],
                member,
                index,
            )

    def _fitting(self, op: Op, family: _Family) -> list[tuple[int, int]]:
        """Return (alternative, variant) of ways that fit the budget if nothing else is alive.

        Where nothing fits, the way with the least bytes stays, once among the ways that overwrite
        nothing and once among the others. The search then finds that it does not fit.
        """
        alive = {v for v in (*family.reads, *family.writes) if not self.graph.values[v].is_constant}
        room = self.task.budget_bytes - self.graph.constant_bytes
        room -= self.graph.bytes_of(alive)
        ways = [(member, op.alternatives[member]) for member in family.members]
        needed = {
            (member, index): variant.workspace_bytes - self.graph.taken_over_bytes(way)
            for member, way in ways
            for index, variant in enumerate(way.variants)
        }
        is_plain = {place: op.alternatives[place[0]].overwrites is None for place in needed}
        least = {
            plain: min((size for p, size in needed.items() if is_plain[p] == plain), default=0)
            for plain in (True, False)
        }
        return [p for p, size in needed.items() if size <= max(room, least[is_plain[p]])]

    def _alternative(self, op: Op, family: _Family) -> EngineAlternative:
        fitting = [(op.alternatives[m], index) for m, index in self._fitting(op, family)]
        options = [
            (
                self._cost(way.variants[index].cost_s),
                way.variants[index].workspace_bytes - self.graph.taken_over_bytes(way),
            )
            for way, index in fitting
        ]
        reads = [
            self.engine_values[v] for v in family.reads if not self.graph.values[v].is_constant
        ]
        return EngineAlternative(
            reads=tuple(dict.fromkeys(reads)),
            writes=tuple(self.engine_values[v] for v in family.writes),
            options=_undominated(options),
            first=family.first,
            again=family.again,
        )

    def _choices(self) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
        """The graph's linked alternatives in the engine's numbers."""
        return tuple(
            tuple(
                tuple((self.engine_ops[op], self.first_numbers[op, way]) for op, way in branch)
                for branch in choice.branches
                if all(pair in self.first_numbers for pair in branch)
            )
            for choice in self.graph.choices
        )


def _undominated(options: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return pairs of cost and bytes by cost, each with fewer bytes than all cheaper pairs."""
    kept: list[tuple[int, int]] = []
    for option in sorted(options):
        if not kept or option[1] < kept[-1][1]:
            kept.append(option)
    return tuple(kept)


def _order(
    graph: Graph, appearing: dict[SegmentId, list[ValueId]]
) -> tuple[tuple[SegmentId, Op | None], ...]:
    """Segment crossings (None) that hold or make anything, and ops, in the order of the step.

    `appearing`: the tangents of each segment.
    """
    order: list[tuple[SegmentId, Op | None]] = []
    for segment in graph.segments:
        if segment.outside_bytes or appearing[segment.id]:
            order.append((segment.id, None))
        order.extend((segment.id, op) for op in graph.ops if op.segment == segment.id)
    return tuple(order)


def _is_default(op: Op, number: int) -> bool:
    """The default, or a way that differs from it only in writing over its input."""
    default, other = op.alternatives[0], op.alternatives[number]
    same = set(default.reads) == set(other.reads) and default.writes == other.writes
    return number == 0 or (same and other.use == default.use)
