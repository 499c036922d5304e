"""A plan explained in numbers: holders of memory, bytes saved, and cost."""

from __future__ import annotations

from collections import Counter, defaultdict

import msgspec

from tightfit.graph.ir import Graph, Phase, SegmentId, ValueId
from tightfit.graph.liveness import producers
from tightfit.graph.names import holder_module, name_op
from tightfit.plan.assemble import everything_kept
from tightfit.plan.plan import Compute, Enter, Free, HandOver, Load, Plan, Store
from tightfit.plan.simulate import Simulation, simulate


class PlannedPart(msgspec.Struct, frozen=True):
    """A plan of a kind of part: its name, its step, the plan, and its calls in the last step."""

    name: str
    graph: Graph
    plan: Plan
    calls: int


class PhaseMemory(msgspec.Struct, frozen=True, kw_only=True):
    # segment, phase, program: the segment
    segment: SegmentId
    phase: Phase
    program: int
    # begin_bytes, peak_bytes, end_bytes: bytes alive right after it is entered, at its worst
    # instant, and at its end; constants included
    begin_bytes: int
    peak_bytes: int
    end_bytes: int


class Holder(msgspec.Struct, frozen=True):
    """A value that is alive at the peak."""

    value: ValueId
    name: str
    module: str
    size_bytes: int


class ModuleShare(msgspec.Struct, frozen=True, kw_only=True):
    module: str  # the module's name; an operator or a role where no module is known
    held_bytes: int  # bytes of its values alive at the peak of the plan
    # Bytes of its values alive at the peak of a step that keeps everything, minus `held_bytes`.
    # Negative if the plan holds more of it at its own peak.
    saved_bytes: int
    recomputed_ops: int  # how many times one of its ops is computed again
    recompute_s: float  # seconds of that


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """A plan in numbers."""

    # budget_bytes, peak_bytes, constant_bytes, eager_peak_bytes: the promise, the peak, bytes
    # resident the whole step, and the peak of a step that keeps everything; constants included in
    # all
    budget_bytes: int
    peak_bytes: int
    constant_bytes: int
    eager_peak_bytes: int
    peak_at: str  # the instruction during which the peak is reached
    # Bytes at the peak that are no value: workspace, temporaries, memory of user code
    working_bytes: int
    # cost_s, baseline_cost_s, overhead: seconds of the plan, with nothing recomputed, and the
    # fraction the plan costs more
    cost_s: float
    baseline_cost_s: float
    overhead: float
    recomputed_ops: int  # how many times an op is computed again
    phases: tuple[PhaseMemory, ...]  # one per segment
    holders: tuple[Holder, ...]  # every value alive at the peak, largest first
    # By held bytes at the peak of the step that keeps everything, largest first
    modules: tuple[ModuleShare, ...]
    # Alternatives other than the default that first computations use, with how often
    alternatives: tuple[tuple[str, int], ...]
    moved_bytes: int = 0  # over the link to far memory, both ways
    stall_s: float = 0.0  # for which ops wait for it; a part of the overhead


def explain(plan: Plan, graph: Graph) -> Explanation:
    """Return the memory, savings and cost of a valid plan of this graph.

    `plan`: a plan that passes `tightfit.plan.verify` on this graph.
    """
    result = simulate(graph, plan)
    eager = simulate(graph, everything_kept(graph, plan.gradients))
    made_by = producers(graph)
    holders = tuple(
        Holder(value, graph.values[value].name, holder_module(graph, made_by, value), size)
        for value, size in result.holders
    )
    return Explanation(
        budget_bytes=plan.budget_bytes,
        peak_bytes=result.peak_bytes,
        constant_bytes=graph.constant_bytes,
        eager_peak_bytes=eager.peak_bytes,
        peak_at=_name_instruction(plan, graph, result.peak_index),
        working_bytes=result.peak_workspace_bytes,
        cost_s=result.cost_s,
        baseline_cost_s=result.baseline_cost_s,
        overhead=result.overhead,
        recomputed_ops=sum(times for _, times in result.recomputed),
        phases=_phases(plan, graph, result),
        holders=holders,
        modules=_modules(plan, graph, result, eager),
        alternatives=_alternatives(plan, graph),
        moved_bytes=result.moved_bytes,
        stall_s=result.stall_s,
    )


def _name_instruction(plan: Plan, graph: Graph, index: int) -> str:
    if index < 0:
        return "the start of the step"
    match plan.instructions[index]:
        case Compute(op):
            before = plan.instructions[:index]
            again = any(isinstance(step, Compute) and step.op == op for step in before)
            return name_op(graph.ops[op]) + (", computed again" if again else "")
        case Enter(segment):
            return f"the entry of segment {segment} ({graph.segments[segment].phase})"
        case Load(value):
            return f"the load of {graph.values[value].name}"
        case Free() | HandOver() | Store():
            return f"instruction {index}"


def _phases(plan: Plan, graph: Graph, result: Simulation) -> tuple[PhaseMemory, ...]:
    entries = [i for i, step in enumerate(plan.instructions) if isinstance(step, Enter)]
    ends = [*entries[1:], len(plan.instructions)]
    return tuple(
        PhaseMemory(
            segment=segment.id,
            phase=segment.phase,
            program=segment.program,
            begin_bytes=result.after_bytes[begin],
            peak_bytes=max(result.during_bytes[begin:end]),
            end_bytes=result.after_bytes[end - 1],
        )
        for segment, begin, end in zip(graph.segments, entries, ends, strict=True)
    )


def _modules(
    plan: Plan, graph: Graph, result: Simulation, eager: Simulation
) -> tuple[ModuleShare, ...]:
    made_by = producers(graph)
    held: Counter[str] = Counter()
    eager_held: Counter[str] = Counter()
    for counter, simulation in ((held, result), (eager_held, eager)):
        for value, size in simulation.holders:
            counter[holder_module(graph, made_by, value)] += size
    times: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    seen: set[int] = set()
    for step in plan.computes:
        op = graph.ops[step.op]
        if step.op in seen:
            module = op.module or op.target
            times[module] += 1
            seconds[module] += step.cost_s(graph)
        seen.add(step.op)
    names = sorted({*held, *eager_held, *times}, key=lambda name: (-eager_held[name], name))
    return tuple(
        ModuleShare(
            module=name,
            held_bytes=held[name],
            saved_bytes=eager_held[name] - held[name],
            recomputed_ops=times[name],
            recompute_s=seconds[name],
        )
        for name in names
    )


def _alternatives(plan: Plan, graph: Graph) -> tuple[tuple[str, int], ...]:
    first = {step.op: step for step in reversed(plan.computes)}
    used = Counter(
        step.alternative_in(graph).name for step in first.values() if step.alternative > 0
    )
    return tuple(sorted(used.items()))
