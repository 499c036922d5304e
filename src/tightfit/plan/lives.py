"""Lifetimes as a plan runs: of every instance of every value, and the workspaces of ops."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from tightfit.graph.ir import Graph, OpId, SegmentId, ValueId
from tightfit.plan.plan import Compute, Enter, Free, HandOver, Load, Plan, Store

Content: TypeAlias = Literal["value", "second instance", "workspace", "random state", "outside"]


class Life(msgspec.Struct, frozen=True):
    """One stretch of time during which some bytes are held."""

    # lower, upper: held at the ticks [lower, upper)
    lower: int
    upper: int
    size_bytes: int  # how much
    # ``"value"``; ``"second instance"``: a value written again while it is alive; ``"workspace"``
    # or ``"random state"`` of an op; ``"outside"``: memory of user code while a segment is entered
    content: Content
    value: ValueId | None  # the value at its end; None for other contents
    op: OpId | None  # the op that made it or needs it; None for user code


def lives_of(graph: Graph, plan: Plan) -> tuple[Life, ...]:
    """Return the lifetimes in a valid plan, in the order of birth.

    Instruction i happens at the ticks [2i, 2i + 1): its temporaries live then, its results live
    from 2i on. Constants have no life: they are always there. The most bytes alive at one tick and
    the bytes of the constants are together the simulated peak of the plan.
    """
    lives = _Lives(graph, plan)
    for index, instruction in enumerate(plan.instructions):
        lives.at = 2 * index
        match instruction:
            case Compute():
                lives.compute(index, instruction)
            case Free(value):
                lives.end(value)
            case HandOver(values):
                lives.hand_over(values)
            case Enter(segment):
                lives.enter(segment)
            case Store():
                pass  # it keeps its place until it is freed
            case Load(value):
                lives.load(value)
    return lives.finished()


class _Lives:
    """Lives that have ended; of values still alive, when they began and which op made them."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.at = 0
        self._graph = graph
        self._plan = plan
        self._last_compute = plan.last_computes()
        self._computed: set[OpId] = set()
        self._alive: dict[ValueId, tuple[int, OpId | None]] = {}
        self._makers: dict[ValueId, OpId] = {}
        self._states: dict[OpId, int] = {}
        self._ended: list[Life] = []

    def compute(self, index: int, instruction: Compute) -> None:
        """An op writes values; those alive keep their place, and the new instance is temporary."""
        op = self._graph.ops[instruction.op]
        way = instruction.alternative_in(self._graph)
        is_first = op.id not in self._computed
        self._computed.add(op.id)
        self._makers.update(dict.fromkeys(way.writes, op.id))
        is_last = self._last_compute[op.id] == index
        if is_first and op.random_state_bytes and not is_last:
            self._states[op.id] = self.at
        if way.overwrites is not None:
            self._alive[way.writes[0]] = self._alive.pop(way.overwrites)
        for value in way.writes[way.overwrites is not None :]:
            if value in self._alive:
                size = self._graph.values[value].size_bytes
                self._while_running(size, "second instance", op.id, value)
            else:
                self._alive[value] = (self.at, op.id)
        workspace_bytes = way.variants[instruction.variant].workspace_bytes
        self._while_running(workspace_bytes, "workspace", op.id)
        if is_last and op.id in self._states:
            lower, size = self._states.pop(op.id), op.random_state_bytes
            self._ended.append(Life(lower, self.at + 1, size, "random state", None, op.id))

    def end(self, value: ValueId, *, after: int = 0) -> None:
        if value in self._alive:
            lower, op = self._alive.pop(value)
            size = self._graph.values[value].size_bytes
            self._ended.append(Life(lower, self.at + after, size, "value", value, op))

    def load(self, value: ValueId) -> None:
        """A value comes back from far memory."""
        self._alive[value] = (self.at, self._makers.get(value))

    def hand_over(self, values: tuple[ValueId, ...]) -> None:
        """Gradients that are added to existing ones end here."""
        if self._plan.gradients == "accumulated":
            for value in values:
                self.end(value, after=1)

    def enter(self, segment: SegmentId) -> None:
        """Values that replace buffers end; memory of user code counts; tangents begin."""
        for value in [v for v in self._alive if self._graph.values[v].fate == "written_back"]:
            self.end(value)
        self._while_running(self._graph.segments[segment].outside_bytes, "outside", None)
        for value in self._graph.values:
            if value.role == "tangent" and value.segment == segment:
                self._alive[value.id] = (self.at + 1, None)

    def finished(self) -> tuple[Life, ...]:
        """Return all lifetimes; values still alive end with the step."""
        self.at = 2 * len(self._plan.instructions)
        for value in tuple(self._alive):
            self.end(value)
        kept = [life for life in self._ended if life.size_bytes > 0 and life.lower < life.upper]
        return tuple(sorted(kept, key=lambda life: (life.lower, life.upper, life.size_bytes)))

    def _while_running(
        self, size_bytes: int, content: Content, op: OpId | None, value: ValueId | None = None
    ) -> None:
        self._ended.append(Life(self.at, self.at + 1, size_bytes, content, value, op))
