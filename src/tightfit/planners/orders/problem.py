"""The problem of ordering a step's ops: the bytes alive when every op runs once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tightfit._core import _engine
from tightfit.graph.changes import need_before_changes
from tightfit.graph.ir import Gradients, Graph, Op, OpId, SegmentId, ValueId
from tightfit.graph.liveness import computed_ops, extra_bytes, producers, readers, tangents
from tightfit.planners.base import Task

_CROSSING = -1


@dataclass(frozen=True)
class StepOrders:
    """The orders that a step may run in, for the core."""

    # One group per segment's entry and one for its ops, constants left out
    core: _engine.OrderProblem
    # For each op of the core the op of the graph; -1 for the entry of a segment
    ops: tuple[OpId, ...]
    numbers: Mapping[OpId, int]  # the core's op for each op of the graph

    def traced(self) -> list[int]:
        """Return the traced order, in the core's numbers as everything here."""
        return list(range(len(self.ops)))

    def from_graph(self, order: tuple[OpId, ...]) -> list[int]:
        """Return an order of the graph's ops that keeps the order of the segments."""
        inner = iter(self.numbers[op] for op in order)
        return [at if op == _CROSSING else next(inner) for at, op in enumerate(self.ops)]

    def to_graph(self, order: list[int]) -> tuple[OpId, ...]:
        """Return an order as ops of the graph."""
        return tuple(self.ops[op] for op in order if self.ops[op] != _CROSSING)


def keeps_its_place(graph: Graph, op: Op) -> bool:
    """Return whether an op keeps its traced order with the others of its kind in its segment.

    Ops that draw random numbers do, and pinned ops, which may have effects. Pinned ops that make a
    gradient or change a constant need not: nothing else has the same effect. On a CUDA device
    graphs do not say which ops draw: there the whole forward pass keeps its order.
    """
    if graph.device.kind == "cuda" and graph.segments[op.segment].phase == "forward":
        return True
    made = (graph.values[v] for way in op.alternatives for v in way.writes)
    gives = any(value.fate == "handed_over" for value in made)
    return op.random_state_bytes > 0 or (op.pinned is not None and not gives and not op.changes)


def step_orders(task: Task) -> StepOrders:
    """Return the orders that a task's step may run in with the same results.

    Every op runs once with its default alternative. It stays in its segment, and follows everything
    that any of its alternatives reads. If it overwrites a value, it follows the value's other
    readers. If it changes a constant, it follows all ops that need the old content. Ops that
    `keeps_its_place` names keep their order.
    """
    return _Builder(task).build()


class _Builder:
    def __init__(self, task: Task) -> None:
        self.graph = task.graph
        self.gradients: Gradients = task.gradients
        self.tangents = tangents(task.graph)
        self.core = _engine.OrderProblem()
        self.computed = {op.id for op in computed_ops(task.graph)}
        self.made_by = producers(task.graph)
        self.readers = readers(task.graph)
        self.before = need_before_changes(task.graph)
        self.values: dict[ValueId, int] = {}
        self.numbers: dict[OpId, int] = {}
        self.ops: list[OpId] = []
        self.fixed: dict[SegmentId, int] = {}  # the last op of each segment that keeps its order

    def build(self) -> StepOrders:
        for segment in self.graph.segments:
            self._enter(segment.id)
            for op in self.graph.ops:
                if op.segment == segment.id:
                    self._add(op)
        return StepOrders(self.core, tuple(self.ops), self.numbers)

    def _enter(self, segment: SegmentId) -> None:
        """The tangents appear, and user code holds its memory."""
        appearing = self.tangents[segment]
        for value in appearing:
            self._add_value(value, 2 * segment)
        outside_bytes = self.graph.segments[segment].outside_bytes
        workspace = max(0, outside_bytes - self.graph.bytes_of(appearing))
        writes = [self.values[value] for value in appearing]
        self.core.add_op(2 * segment, [], writes, workspace, [])
        self.ops.append(_CROSSING)

    def _add(self, op: Op) -> None:
        group = 2 * op.segment + 1
        reads, writes, workspace = [], [], 0
        if op.id in self.computed:
            way = op.alternatives[0]
            for value in way.writes:
                self._add_value(value, group)
            reads = [v for v in dict.fromkeys(way.reads) if not self.graph.values[v].is_constant]
            reads = [self.values[value] for value in reads]
            writes = [self.values[value] for value in way.writes]
            workspace = extra_bytes(self.graph, way)
        followed = self._followed(op)
        self.numbers[op.id] = self.core.add_op(group, reads, writes, workspace, followed)
        self.ops.append(op.id)
        if keeps_its_place(self.graph, op):
            self.fixed[op.segment] = self.numbers[op.id]

    def _add_value(self, value: ValueId, group: int) -> None:
        info = self.graph.values[value]
        kept = -1
        if info.stays_to_end(self.gradients):
            kept = 2 * len(self.graph.segments) - 1
        elif info.fate == "written_back":
            kept = group
        self.values[value] = self.core.add_value(info.size_bytes, kept)

    def _followed(self, op: Op) -> list[int]:
        """Earlier ops that an op has to follow."""
        read = {v for way in op.alternatives if way.use != "again" for v in way.reads}
        followed = {self.made_by[value] for value in read if value in self.made_by}
        overwritten = op.alternatives[0].overwrites
        if overwritten is not None:
            followed.update(self.readers[overwritten])
        followed.update(self.before.get(op.id, ()))
        numbers = [self.numbers[other] for other in sorted(followed) if other < op.id]
        if keeps_its_place(self.graph, op) and op.segment in self.fixed:
            numbers.append(self.fixed[op.segment])
        return numbers
