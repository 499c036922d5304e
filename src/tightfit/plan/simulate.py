"""Replay a plan byte by byte: the memory curve, the peak and its holders, the cost.

This is the readable reference for the memory of a plan; the C++ engine and the lowered
programs must agree with it.
"""

from __future__ import annotations

import msgspec

from tightfit.graph.ir import Graph, OpId, ValueId
from tightfit.graph.liveness import computed_ops, tangents
from tightfit.plan.plan import Compute, Enter, Free, HandOver, Instruction, Load, Plan, Store
from tightfit.plan.transfers import Link, Transfer


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """Memory and time of a plan when it runs."""

    peak_bytes: int  # the most bytes alive at any instant, constants and workspace included
    peak_index: int  # the instruction during which the peak is reached (-1 for an empty plan)
    # during_bytes, after_bytes: bytes alive at the worst instant of each instruction and right
    # after it
    during_bytes: tuple[int, ...]
    after_bytes: tuple[int, ...]
    # Values alive at the peak with their bytes, largest first
    holders: tuple[tuple[ValueId, int], ...]
    # Bytes at the peak that are no value: workspace, temporary second instances, memory of user
    # code, random-number states
    peak_workspace_bytes: int
    # cost_s, baseline_cost_s: seconds of the plan's ops, and with nothing recomputed and default
    # alternatives
    cost_s: float
    baseline_cost_s: float
    # (op, how many times it is computed again), for every op computed more than once
    recomputed: tuple[tuple[OpId, int], ...]
    # The instruction that enters the first backward segment; their number if none does
    crossing_index: int
    stall_s: float = 0.0  # seconds for which ops wait for transfers to or from far memory
    far_peak_bytes: int = 0  # the most bytes in far memory at any instant
    transfers: tuple[Transfer, ...] = ()  # every store and load, in the order of the plan

    @property
    def time_s(self) -> float:
        """Seconds of the step: its ops, and stalls for transfers."""
        return self.cost_s + self.stall_s

    @property
    def moved_bytes(self) -> int:
        """Bytes that cross the link, both ways together."""
        return sum(transfer.size_bytes for transfer in self.transfers)

    @property
    def crossing_bytes(self) -> int:
        """Live bytes between forward and backward."""
        return self.after_bytes[self.crossing_index - 1]

    @property
    def overhead(self) -> float:
        """(time / baseline cost) - 1."""
        if self.baseline_cost_s == 0:
            return 0.0
        return self.time_s / self.baseline_cost_s - 1.0


def baseline_cost_s(graph: Graph) -> float:
    """Return the cost in seconds with nothing recomputed and default alternatives."""
    return sum(op.alternatives[0].least_cost_s for op in computed_ops(graph))


class _Memory:
    """The bytes alive while a plan is replayed."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph = graph
        self.gradients = plan.gradients
        self.live: dict[ValueId, int] = {}
        self.live_bytes = graph.constant_bytes
        self.states: dict[OpId, int] = {}
        self.last_compute = plan.last_computes()
        self.last_load = {
            step.value: index
            for index, step in enumerate(plan.instructions)
            if isinstance(step, Load)
        }
        self.counts: dict[OpId, int] = {}
        self.cost_s = 0.0
        self.link = Link(plan.far)
        self.far_bytes = 0
        self.arriving: dict[ValueId, int] = {}  # value -> the load it comes by
        self.tangents = tangents(graph)

    def add(self, value: ValueId) -> None:
        size = self.graph.values[value].size_bytes
        self.live[value] = size
        self.live_bytes += size

    def drop(self, value: ValueId) -> None:
        self.live_bytes -= self.live.pop(value, 0)

    def step(self, index: int, instruction: Instruction) -> int:
        """Apply one instruction; return the bytes alive at its worst instant."""
        match instruction:
            case Compute():
                return self._compute(index, instruction)
            case Free(value):
                during = self.live_bytes
                self.settle(value)
                self.drop(value)
                return during
            case HandOver(values):
                during = self.live_bytes
                if self.gradients == "accumulated":
                    for value in values:
                        self.drop(value)
                return during
            case Enter(segment):
                return self._enter(segment)
            case Store(value):
                size = self.graph.values[value].size_bytes
                self.far_bytes += size
                self.link.begin(value, size, "store", self.cost_s)
                return self.live_bytes
            case Load(value):
                size = self.graph.values[value].size_bytes
                self.add(value)
                self.arriving[value] = index
                self.link.begin(value, size, "load", self.cost_s)
                return self.live_bytes

    def settle(self, value: ValueId) -> None:
        """Wait until a value is there; its copy far away ends with its last load."""
        load = self.arriving.pop(value, None)
        self.link.wait(value, self.cost_s)
        if load is not None and load == self.last_load[value]:
            self.far_bytes -= self.graph.values[value].size_bytes

    def _compute(self, index: int, instruction: Compute) -> int:
        op = self.graph.ops[instruction.op]
        alternative = instruction.alternative_in(self.graph)
        variant = alternative.variants[instruction.variant]
        for value in alternative.reads:
            if value in self.arriving or value == alternative.overwrites:
                self.settle(value)
        first = self.counts.get(op.id, 0) == 0
        self.counts[op.id] = self.counts.get(op.id, 0) + 1
        self.cost_s += variant.cost_s
        if first and op.random_state_bytes and self.last_compute[op.id] > index:
            self.states[op.id] = op.random_state_bytes
            self.live_bytes += op.random_state_bytes
        temporary = 0
        writes = alternative.writes
        if alternative.overwrites is not None:
            self.drop(alternative.overwrites)
            self.add(writes[0])
            writes = writes[1:]
        for value in writes:
            if value in self.live:
                temporary += self.graph.values[value].size_bytes
            else:
                self.add(value)
        during = self.live_bytes + temporary + variant.workspace_bytes
        if op.id in self.states and self.last_compute[op.id] == index:
            self.live_bytes -= self.states.pop(op.id)
        return during

    def _enter(self, segment: int) -> int:
        self.write_back()
        during = self.live_bytes + self.graph.segments[segment].outside_bytes
        for value in self.tangents[segment]:
            self.add(value)
        return max(during, self.live_bytes)

    def write_back(self) -> None:
        """Drop the values that replace buffers: the segment that made them has ended."""
        for value in [v for v in self.live if self.graph.values[v].fate == "written_back"]:
            self.drop(value)


def simulate(graph: Graph, plan: Plan) -> Simulation:
    """Replay a plan over a graph.

    The plan must be valid (see `tightfit.plan.verify`); a value may be freed only while alive.

    Returns the memory curve in bytes, its peak with holders, and the cost in seconds.
    """
    memory = _Memory(graph, plan)
    during_bytes: list[int] = []
    after_bytes: list[int] = []
    peak, peak_index, far_peak = graph.constant_bytes, -1, 0
    for index, instruction in enumerate(plan.instructions):
        during = memory.step(index, instruction)
        if during > peak:
            peak, peak_index = during, index
        during_bytes.append(during)
        after_bytes.append(memory.live_bytes)
        far_peak = max(far_peak, memory.far_bytes)
    memory.link.wait_for_all(memory.cost_s)
    holders = _alive_after(graph, plan, peak_index)
    held = sum(holders.values())
    return Simulation(
        peak_bytes=peak,
        peak_index=peak_index,
        during_bytes=tuple(during_bytes),
        after_bytes=tuple(after_bytes),
        holders=tuple(sorted(holders.items(), key=lambda item: (-item[1], item[0]))),
        peak_workspace_bytes=peak - held - graph.constant_bytes,
        cost_s=memory.cost_s,
        baseline_cost_s=baseline_cost_s(graph),
        recomputed=tuple((op, n - 1) for op, n in sorted(memory.counts.items()) if n > 1),
        crossing_index=_crossing_index(graph, plan),
        stall_s=memory.link.stall_s,
        far_peak_bytes=far_peak,
        transfers=tuple(memory.link.transfers),
    )


def _crossing_index(graph: Graph, plan: Plan) -> int:
    for index, step in enumerate(plan.instructions):
        if isinstance(step, Enter) and graph.segments[step.segment].phase == "backward":
            return index
    return len(plan.instructions)


def _alive_after(graph: Graph, plan: Plan, index: int) -> dict[ValueId, int]:
    """Return the values alive right after an instruction, with their bytes.

    A peak is never reached while values are freed, so those alive after its instruction are
    those alive at the peak.
    """
    memory = _Memory(graph, plan)
    for position, instruction in enumerate(plan.instructions[: index + 1]):
        memory.step(position, instruction)
    return memory.live
