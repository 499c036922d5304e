"""Judge a plan: is every instruction legal on this graph, and does it stay within its budget?

The verifier shares no code with planners, `tightfit.plan.assemble` or `tightfit.plan.simulate`:
it walks the instructions once with its own set of values alive and its own byte account.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NoReturn

from tightfit.errors import InvalidPlan, PlanMismatch
from tightfit.graph.fingerprint import fingerprint
from tightfit.graph.ir import Alternative, Choice, Graph, Op, OpId, SegmentId, ValueId
from tightfit.plan.plan import FORMAT, Compute, Enter, Free, HandOver, Instruction, Plan
from tightfit.units import format_bytes

__all__ = ["verified_peak_bytes", "verify"]

_HOLDERS_SHOWN = 5


def verify(plan: Plan, graph: Graph) -> None:
    """Raise unless the plan is a legal step of this graph that stays within its budget.

    Parameters
    ----------
    plan : Plan
        Instructions and the budget they promise to keep, in bytes.
    graph : Graph
        The step the plan was made for; it must be valid (`tightfit.graph.validate_graph`).

    Raises
    ------
    PlanMismatch
        If the plan was made for a graph with another fingerprint.
    InvalidPlan
        Names the first broken rule, the instruction, op and value where it is broken; or the
        peak, the budget, and the modules that hold the most at the peak.
    """
    walk = _walk(plan, graph)
    if walk.peak_bytes > plan.budget_bytes:
        raise InvalidPlan(_over_budget(plan, graph, walk))


def verified_peak_bytes(plan: Plan, graph: Graph) -> int:
    """Return the peak of a legal plan in bytes, constants included, by the verifier's account.

    Raises
    ------
    PlanMismatch, InvalidPlan
        As `verify`, except that the budget is not looked at.
    """
    return _walk(plan, graph).peak_bytes


def _walk(plan: Plan, graph: Graph) -> _Walk:
    if plan.format != FORMAT:
        raise InvalidPlan(
            f"plan format {plan.format} is not supported (this version reads {FORMAT})"
        )
    expected = fingerprint(graph)
    if plan.graph != expected:
        raise PlanMismatch(
            f"the plan was made for the graph {plan.graph}, but {graph.name or 'this graph'!r} "
            f"is {expected}: plan again, or give the graph the plan was made for"
        )
    walk = _Walk(plan, graph)
    walk.run(len(plan.instructions))
    walk.end()
    return walk


def _over_budget(plan: Plan, graph: Graph, walk: _Walk) -> str:
    """Say by how much the budget is exceeded, where, and which modules hold the most there."""
    where = "before the first instruction"
    replay = _Walk(plan, graph)
    if walk.peak_index >= 0:
        replay.run(walk.peak_index)
        where = replay.describe(walk.peak_index, plan.instructions[walk.peak_index])
    by_module: dict[str, int] = defaultdict(int)
    for value in replay.alive:
        by_module[replay.module_of(value)] += graph.values[value].size_bytes
    largest = sorted(by_module.items(), key=lambda item: (-item[1], item[0]))[:_HOLDERS_SHOWN]
    holders = ", ".join(f"{module} {format_bytes(size)}" for module, size in largest)
    return (
        f"the plan needs {walk.peak_bytes} bytes ({format_bytes(walk.peak_bytes)}) at {where}, "
        f"which is {walk.peak_bytes - plan.budget_bytes} more than its budget of "
        f"{plan.budget_bytes} ({format_bytes(plan.budget_bytes)}); constants take "
        f"{format_bytes(graph.constant_bytes)}, most is held just before by: {holders or 'nothing'}"
    )


class _Walk:
    """One pass over the instructions: what is alive, what has happened, how many bytes."""

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan = plan
        self.graph = graph
        self.segment: SegmentId = -1
        self.alive: set[ValueId] = set()
        self.gone: dict[ValueId, int] = {}  # value -> instruction that ended its last instance
        self.handed_over: dict[ValueId, int] = {}
        self.first: dict[OpId, int] = {}  # op -> alternative of its first computation
        self.bytes = graph.constant_bytes
        self.peak_bytes = graph.constant_bytes
        self.peak_index = -1
        self.producer: dict[ValueId, OpId] = {
            value: op.id
            for op in graph.ops
            for alternative in op.alternatives
            for value in alternative.writes
        }
        self.tangents: dict[SegmentId, list[ValueId]] = defaultdict(list)
        self.written_back: dict[SegmentId, list[ValueId]] = defaultdict(list)
        self.replaced: dict[ValueId, list[SegmentId]] = defaultdict(list)
        for value in graph.values:
            if value.role == "tangent" and value.segment is not None:
                self.tangents[value.segment].append(value.id)
            if value.fate == "written_back" and value.replaces is not None:
                segment = graph.ops[self.producer[value.id]].segment
                self.written_back[segment].append(value.id)
                self.replaced[value.replaces].append(segment)
        self.last_compute: dict[OpId, int] = {
            step.op: index
            for index, step in enumerate(plan.instructions)
            if isinstance(step, Compute)
        }

    def run(self, stop: int) -> None:
        """Check and account the instructions before position `stop`."""
        instructions = self.plan.instructions
        if instructions and not isinstance(instructions[0], Enter):
            self.refuse(0, instructions[0], "a plan begins by entering segment 0")
        for index in range(stop):
            instruction = instructions[index]
            match instruction:
                case Compute():
                    during = self.compute(index, instruction)
                case Free():
                    during = self.free(index, instruction)
                case HandOver():
                    during = self.hand_over(index, instruction)
                case Enter():
                    during = self.enter(index, instruction)
            if during > self.peak_bytes:
                self.peak_bytes, self.peak_index = during, index

    def end(self) -> None:
        """Check what must hold once the last instruction has run."""
        if self.segment != len(self.graph.segments) - 1:
            raise InvalidPlan(
                f"the plan ends in segment {self.segment} (-1: none) but the graph has "
                f"{len(self.graph.segments)} segments, and each must be entered"
            )
        for op in self.graph.ops:
            if op.required and op.id not in self.first:
                raise InvalidPlan(f"the plan never computes {_op(op)}, which is required")
        self.end_segment("the end of the plan")
        for value in self.graph.values:
            if value.fate == "handed_over" and value.id not in self.handed_over:
                raise InvalidPlan(f"the plan never hands over the gradient {self.value(value.id)}")
            if value.fate == "returned" and not self.is_alive(value.id):
                raise InvalidPlan(
                    f"{self.value(value.id)} is returned to the caller but is not alive at the "
                    f"end of the plan ({self.why_dead(value.id)})"
                )
        for number, choice in enumerate(self.graph.choices):
            self.check_choice(number, choice)

    def compute(self, index: int, step: Compute) -> int:
        """Check one computation and account its bytes; return those at its worst instant."""
        graph = self.graph
        if not 0 <= step.op < len(graph.ops):
            self.refuse(index, step, f"the graph has {len(graph.ops)} ops")
        op = graph.ops[step.op]
        if not 0 <= step.alternative < len(op.alternatives):
            self.refuse(index, step, f"the op has {len(op.alternatives)} alternatives")
        alternative = op.alternatives[step.alternative]
        if not 0 <= step.variant < len(alternative.variants):
            self.refuse(index, step, f"the alternative has {len(alternative.variants)} variants")
        for value in alternative.reads:
            if not self.is_alive(value):
                self.refuse(index, step, f"it reads {self.value(value)}, {self.why_dead(value)}")
        again = op.id in self.first
        if again:
            self.check_again(index, step, op, alternative)
        else:
            self.check_first(index, step, op, alternative)
            self.first[op.id] = step.alternative
            if self.last_compute[op.id] > index:
                self.bytes += op.random_state_bytes
        during = self.write(index, step, alternative)
        if again and self.last_compute[op.id] == index:
            self.bytes -= op.random_state_bytes
        return during

    def check_first(self, index: int, step: Compute, op: Op, alternative: Alternative) -> None:
        """Check what only the first computation of an op must keep."""
        if op.segment != self.segment:
            self.refuse(
                index,
                step,
                f"its first computation belongs into segment {op.segment}, "
                f"but the plan is in segment {self.segment}",
            )
        if alternative.use == "again":
            self.refuse(
                index, step, f"alternative {alternative.name!r} serves only later computations"
            )

    def check_again(self, index: int, step: Compute, op: Op, alternative: Alternative) -> None:
        """Check what only a recomputation must keep."""
        segments = self.graph.segments
        if op.pinned is not None:
            self.refuse(index, step, f"the op may not be computed again: {op.pinned}")
        if alternative.use == "first":
            self.refuse(
                index, step, f"alternative {alternative.name!r} serves only the first computation"
            )
        if segments[self.segment].program != segments[op.segment].program:
            self.refuse(
                index,
                step,
                f"an op of program {segments[op.segment].program} cannot be computed again in "
                f"segment {self.segment} of program {segments[self.segment].program}",
            )
        for value in alternative.writes:
            if self.graph.values[value].fate == "handed_over":
                self.refuse(index, step, f"it computes the gradient {self.value(value)} twice")
        for value in alternative.reads:
            for end in self.replaced.get(value, ()):
                if op.segment <= end < self.segment:
                    self.refuse(
                        index,
                        step,
                        f"it reads {self.value(value)}, whose content was replaced when segment "
                        f"{end} ended, after the first computation in segment {op.segment}",
                    )

    def write(self, index: int, step: Compute, alternative: Alternative) -> int:
        """Account what a computation makes; return the bytes at its worst instant."""
        values = self.graph.values
        made = alternative.writes
        target = alternative.overwrites
        if target is not None:
            self.check_overwrite(index, step, alternative, target)
            self.alive.remove(target)
            self.gone[target] = index
            self.alive.add(made[0])
            made = made[1:]
        second_instances = sum(values[v].size_bytes for v in made if v in self.alive)
        self.bytes += sum(values[v].size_bytes for v in made if v not in self.alive)
        self.alive.update(made)
        workspace = alternative.variants[step.variant].workspace_bytes
        return self.bytes + second_instances + workspace

    def check_overwrite(
        self, index: int, step: Compute, alternative: Alternative, target: ValueId
    ) -> None:
        """Check that an in-place computation takes over a value that may go."""
        values = self.graph.values
        made = alternative.writes[0]
        if target not in self.alive:
            self.refuse(index, step, f"it overwrites {self.value(target)}, {self.why_dead(target)}")
        if values[target].fate != "none":
            self.refuse(
                index,
                step,
                f"it overwrites {self.value(target)}, which is {values[target].fate}",
            )
        if values[target].size_bytes != values[made].size_bytes:
            self.refuse(
                index,
                step,
                f"it overwrites {self.value(target)} of {values[target].size_bytes} bytes by "
                f"{self.value(made)} of {values[made].size_bytes}",
            )
        if made in self.alive:
            self.refuse(
                index,
                step,
                f"it writes {self.value(made)} in place while an earlier instance is alive",
            )

    def free(self, index: int, step: Free) -> int:
        """Check that a value may be released; return the bytes before."""
        self.check_value(index, step, step.value)
        value = self.graph.values[step.value]
        if value.is_constant:
            self.refuse(index, step, f"a {value.role} is resident the whole step")
        if value.fate != "none":
            self.refuse(index, step, f"a value that is {value.fate} is never freed by the plan")
        if step.value not in self.alive:
            self.refuse(index, step, f"it is not alive: {self.why_dead(step.value)}")
        before = self.bytes
        self.drop(index, step.value)
        return before

    def hand_over(self, index: int, step: HandOver) -> int:
        """Check that gradients are finished and leave once; return the bytes before."""
        if not step.values:
            self.refuse(index, step, "it hands over nothing")
        before = self.bytes
        for value in step.values:
            self.check_value(index, step, value)
            fate = self.graph.values[value].fate
            if fate != "handed_over":
                self.refuse(index, step, f"{self.value(value)} has the fate {fate!r}")
            if value in self.handed_over:
                self.refuse(
                    index,
                    step,
                    f"{self.value(value)} was handed over at instruction {self.handed_over[value]}",
                )
            if value not in self.alive:
                self.refuse(index, step, f"{self.value(value)} is {self.why_dead(value)}")
            self.handed_over[value] = index
            if self.plan.gradients == "accumulated":
                self.drop(index, value)
        return before

    def enter(self, index: int, step: Enter) -> int:
        """Check the crossing into a segment; return the bytes while crossing."""
        if step.segment != self.segment + 1 or step.segment >= len(self.graph.segments):
            self.refuse(
                index,
                step,
                f"segments are entered once each in order, and the plan is in segment "
                f"{self.segment} of 0 to {len(self.graph.segments) - 1} (-1: none)",
            )
        self.end_segment(f"instruction {index}")
        for value in [v for v in self.alive if self.graph.values[v].fate == "written_back"]:
            self.drop(index, value)
        self.segment = step.segment
        crossing = self.bytes + self.graph.segments[step.segment].outside_bytes
        for value in self.tangents.get(step.segment, ()):
            self.alive.add(value)
            self.bytes += self.graph.values[value].size_bytes
        return max(crossing, self.bytes)

    def end_segment(self, where: str) -> None:
        """Check that what the present segment must write back is there."""
        for value in self.written_back.get(self.segment, ()):
            if value not in self.alive:
                raise InvalidPlan(
                    f"{where}: segment {self.segment} ends, but {self.value(value)}, the new "
                    f"content of {self.value(self.graph.values[value].replaces)}, "
                    f"is {self.why_dead(value)}"
                )

    def check_choice(self, number: int, choice: Choice) -> None:
        """Check that the first computations follow exactly one branch of a choice."""
        taken = [
            branch
            for branch in choice.branches
            if all(self.first.get(op) == alternative for op, alternative in branch)
        ]
        if len(taken) != 1:
            ops = sorted({op for branch in choice.branches for op, _ in branch})
            used = ", ".join(
                f"{_op(self.graph.ops[op])} alternative {self.first.get(op, 'none')}" for op in ops
            )
            raise InvalidPlan(
                f"choice {number}: the plan takes {len(taken)} of its {len(choice.branches)} "
                f"branches and must take exactly one as a whole; it uses {used}"
            )

    def drop(self, index: int, value: ValueId) -> None:
        """Account the end of an instance."""
        self.alive.remove(value)
        self.gone[value] = index
        self.bytes -= self.graph.values[value].size_bytes

    def is_alive(self, value: ValueId) -> bool:
        """Whether an op may read the value now."""
        if self.graph.values[value].is_constant:
            return True
        return value in self.alive and value not in self.handed_over

    def why_dead(self, value: ValueId) -> str:
        """Say why a value cannot be used now."""
        if value in self.handed_over:
            return f"handed over at instruction {self.handed_over[value]}"
        if value in self.gone:
            return f"gone since instruction {self.gone[value]}"
        return "not computed before"

    def check_value(self, index: int, step: Instruction, value: ValueId) -> None:
        """Refuse an unknown value."""
        if not 0 <= value < len(self.graph.values):
            self.refuse(index, step, f"the graph has {len(self.graph.values)} values")

    def refuse(self, index: int, step: Instruction, reason: str) -> NoReturn:
        """Raise `InvalidPlan` with the instruction and the reason."""
        raise InvalidPlan(f"{self.describe(index, step)}: {reason}")

    def value(self, value: ValueId | None) -> str:
        """Name a value for people: id, name and the module that makes it."""
        if value is None:
            return "no value"
        return f"value {value} ({self.graph.values[value].name!r} of {self.module_of(value)})"

    def module_of(self, value: ValueId) -> str:
        """Name the module that makes a value, or its role."""
        if value not in self.producer:
            return self.graph.values[value].role
        op = self.graph.ops[self.producer[value]]
        return op.module or op.target

    def describe(self, index: int, step: Instruction) -> str:
        """Name an instruction for people."""
        match step:
            case Compute(op) if 0 <= op < len(self.graph.ops):
                what = f"compute of {_op(self.graph.ops[op])}"
            case Compute(op, alternative, variant):
                what = f"compute of op {op}, alternative {alternative}, variant {variant}"
            case Free(value) if 0 <= value < len(self.graph.values):
                what = f"free of {self.value(value)}"
            case Free(value):
                what = f"free of value {value}"
            case HandOver(values):
                what = f"hand-over of {_list(values)}"
            case Enter(segment):
                what = f"entry of segment {segment}"
        return f"instruction {index} ({what})"


def _op(op: Op) -> str:
    """Name an op for people."""
    return f"op {op.id} {op.target}" + (f" in {op.module}" if op.module else "")


def _list(values: Iterable[ValueId]) -> str:
    """List ids for people, at most eight."""
    ids = [str(value) for value in values]
    return ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
