"""The blocks of a plan: every lifetime of every value, and what ops need while they run."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from tightfit.graph.ir import Graph, OpId, SegmentId, ValueId
from tightfit.layout.blocks import Block
from tightfit.plan.plan import Compute, Enter, Free, HandOver, Plan

__all__ = ["PlannedBlock", "blocks_of_plan", "planned_blocks"]

Content: TypeAlias = Literal["value", "second instance", "workspace", "random state", "outside"]


class PlannedBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block of a plan and what lies in it.

    Parameters
    ----------
    content : str
        ``"value"``; ``"second instance"``: a value written again while it is alive;
        ``"workspace"`` or ``"random state"`` of an op; ``"outside"``: what user code holds while
        a segment is entered.
    number : int
        The value, op or segment.
    """

    block: Block
    content: Content
    number: int


def blocks_of_plan(graph: Graph, plan: Plan) -> tuple[Block, ...]:
    """Return the blocks of a valid plan, in the order of their birth; see `planned_blocks`."""
    return tuple(planned.block for planned in planned_blocks(graph, plan))


def planned_blocks(graph: Graph, plan: Plan) -> tuple[PlannedBlock, ...]:
    """Return the blocks of a valid plan with what lies in them, in the order of their birth.

    Instruction i happens at the ticks [2i, 2i + 1): what only lives while it runs lives then,
    what it leaves lives from 2i on. Constants have no block. The largest load of the blocks and
    the bytes of the constants are together the simulated peak of the plan.
    """
    lifetimes = _Lifetimes(graph, plan)
    for index, instruction in enumerate(plan.instructions):
        lifetimes.at = 2 * index
        match instruction:
            case Compute():
                lifetimes.compute(index, instruction)
            case Free(value):
                lifetimes.end(value)
            case HandOver(values):
                lifetimes.hand_over(values)
            case Enter(segment):
                lifetimes.enter(segment)
    return lifetimes.finished()


class _Lifetimes:
    """Blocks that ended, and the births of what is alive."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.at = 0
        self._graph = graph
        self._plan = plan
        self._last_compute = {
            step.op: index
            for index, step in enumerate(plan.instructions)
            if isinstance(step, Compute)
        }
        self._computed: set[OpId] = set()
        self._alive: dict[ValueId, int] = {}
        self._states: dict[OpId, int] = {}
        self._ended: list[tuple[int, int, int, Content, int]] = []  # lower, upper, size, ...

    def compute(self, index: int, instruction: Compute) -> None:
        """An op writes values; those alive keep their block, and the new one is temporary."""
        op = self._graph.ops[instruction.op]
        way = op.alternatives[instruction.alternative]
        is_first = op.id not in self._computed
        self._computed.add(op.id)
        is_last = self._last_compute[op.id] == index
        if is_first and op.random_state_bytes and not is_last:
            self._states[op.id] = self.at
        if way.overwrites is not None:
            self._alive[way.writes[0]] = self._alive.pop(way.overwrites)
        for value in way.writes[way.overwrites is not None :]:
            if value in self._alive:
                size = self._graph.values[value].size_bytes
                self._while_running(size, "second instance", value)
            else:
                self._alive[value] = self.at
        workspace_bytes = way.variants[instruction.variant].workspace_bytes
        self._while_running(workspace_bytes, "workspace", op.id)
        if is_last and op.id in self._states:
            lower, size = self._states.pop(op.id), op.random_state_bytes
            self._ended.append((lower, self.at + 1, size, "random state", op.id))

    def end(self, value: ValueId, *, after: int = 0) -> None:
        """A value is let go of."""
        if value in self._alive:
            size = self._graph.values[value].size_bytes
            lower = self._alive.pop(value)
            self._ended.append((lower, self.at + after, size, "value", value))

    def hand_over(self, values: tuple[ValueId, ...]) -> None:
        """Gradients that are added to existing ones end here."""
        if self._plan.gradients == "accumulated":
            for value in values:
                self.end(value, after=1)

    def enter(self, segment: SegmentId) -> None:
        """Values that replace buffers end; what user code holds counts; tangents begin."""
        for value in [v for v in self._alive if self._graph.values[v].fate == "written_back"]:
            self.end(value)
        self._while_running(self._graph.segments[segment].outside_bytes, "outside", segment)
        for value in self._graph.values:
            if value.role == "tangent" and value.segment == segment:
                self._alive[value.id] = self.at + 1

    def finished(self) -> tuple[PlannedBlock, ...]:
        """Return all blocks; what is still alive ends with the step."""
        self.at = 2 * len(self._plan.instructions)
        for value in tuple(self._alive):
            self.end(value)
        kept = [ended for ended in self._ended if ended[2] > 0 and ended[0] < ended[1]]
        return tuple(
            PlannedBlock(
                block=Block(name, lower, upper, size_bytes), content=content, number=number
            )
            for name, (lower, upper, size_bytes, content, number) in enumerate(sorted(kept))
        )

    def _while_running(self, size_bytes: int, content: Content, number: int) -> None:
        self._ended.append((self.at, self.at + 1, size_bytes, content, number))
