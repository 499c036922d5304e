"""Judge a plan: is every instruction legal on this graph, and does it stay within its budget?

The verifier shares no code with planners, `tightfit.plan.assemble` or `tightfit.plan.simulate`:
it walks the instructions once with its own set of values alive and its own byte account.

Which values are near or far at an instruction does not depend on how fast a link is. A stored value
keeps its place until a `Free`, which waits, and a copy far away lasts until an op has waited for
its last `Load`. So both budgets hold at every instant, for any real duration of transfers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NoReturn

from tightfit.errors import InvalidPlan, PlanMismatch, first_of
from tightfit.graph.fingerprint import fingerprint
from tightfit.graph.ir import Alternative, Choice, Graph, Op, OpId, SegmentId, ValueId
from tightfit.graph.liveness import producers, tangents
from tightfit.graph.names import holder_module, name_op, name_value
from tightfit.plan.accounts import FarAccount, NearAccount
from tightfit.plan.plan import FORMAT, Compute, Enter, Free, HandOver, Load, Plan, Store
from tightfit.units import format_bytes

_HOLDERS_SHOWN = 5


def verify(plan: Plan, graph: Graph) -> None:
    """Raise unless the plan is a legal step of this graph that stays within its budget.

    `plan`: instructions and the budget they promise to keep, in bytes. `graph`: the step the plan
    was made for; it must be valid (`tightfit.graph.validate_graph`). Raises `PlanMismatch` if the
    plan was made for a graph with another fingerprint. Raises `InvalidPlan`, which names the first
    broken rule with the instruction, op and value. If the budget is exceeded, it names the peak and
    the modules that hold the most there. If far memory is too small, it names the bytes there and
    the capacity.
    """
    walk = _checked_walk(plan, graph)
    if walk.peak_bytes > plan.budget_bytes:
        raise InvalidPlan(_over_budget(plan, graph, walk))
    capacity_bytes = 0 if plan.far is None else plan.far.capacity_bytes
    if walk.away.peak_bytes > capacity_bytes:
        raise InvalidPlan(
            f"the plan holds {walk.away.peak_bytes} bytes "
            f"({format_bytes(walk.away.peak_bytes)}) in far memory, which has a capacity of "
            f"{capacity_bytes} ({format_bytes(capacity_bytes)})"
        )


def verified_peaks(plan: Plan, graph: Graph) -> tuple[int, int]:
    """Return the peaks of a legal plan in bytes: in near memory, with constants, and in far memory.

    Raises `PlanMismatch` or `InvalidPlan` as `verify`, except that no budget is looked at.
    """
    walk = _checked_walk(plan, graph)
    return walk.peak_bytes, walk.away.peak_bytes


def _checked_walk(plan: Plan, graph: Graph) -> _Walk:
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
        where = replay.describe(walk.peak_index)
    by_module: dict[str, int] = defaultdict(int)
    for value in replay.memory.alive:
        by_module[holder_module(graph, replay.producer, value)] += graph.values[value].size_bytes
    largest = sorted(by_module.items(), key=lambda item: (-item[1], item[0]))[:_HOLDERS_SHOWN]
    holders = ", ".join(f"{module} {format_bytes(size)}" for module, size in largest)
    return (
        f"the plan needs {walk.peak_bytes} bytes ({format_bytes(walk.peak_bytes)}) at {where}, "
        f"which is {walk.peak_bytes - plan.budget_bytes} more than its budget of "
        f"{plan.budget_bytes} ({format_bytes(plan.budget_bytes)}); constants take "
        f"{format_bytes(graph.constant_bytes)}, most is held just before by: {holders or 'nothing'}"
    )


class _Borders:
    """Changes of values where segments begin and end."""

    def __init__(self, graph: Graph, producer: dict[ValueId, OpId]) -> None:
        self.tangents = tangents(graph)
        self.written_back: dict[SegmentId, list[ValueId]] = defaultdict(list)
        self.replaced: dict[ValueId, list[SegmentId]] = defaultdict(list)
        for value in graph.values:
            if value.fate == "written_back" and value.replaces is not None:
                segment = graph.ops[producer[value.id]].segment
                self.written_back[segment].append(value.id)
                self.replaced[value.replaces].append(segment)


class _Walk:
    """One pass over the instructions: live values, past events, bytes."""

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan = plan
        self.graph = graph
        self.index = 0  # the current instruction
        self.segment: SegmentId = -1
        self.memory = NearAccount(graph)
        self.away = FarAccount(graph, plan)
        self.first: dict[OpId, int] = {}  # op -> alternative of its first computation
        self.changed: dict[ValueId, int] = {}  # constants that an op has written over
        self.peak_bytes = graph.constant_bytes
        self.peak_index = -1
        self.producer = producers(graph)
        self.borders = _Borders(graph, self.producer)
        self.last_compute = plan.last_computes()

    def run(self, stop: int) -> None:
        """Check and account the instructions before position `stop`."""
        instructions = self.plan.instructions
        if instructions and not isinstance(instructions[0], Enter):
            self.refuse("a plan begins by entering segment 0")
        for self.index in range(stop):
            instruction = instructions[self.index]
            match instruction:
                case Compute():
                    during = self.compute(instruction)
                case Free():
                    during = self.free(instruction)
                case HandOver():
                    during = self.hand_over(instruction)
                case Enter():
                    during = self.enter(instruction)
                case Store():
                    during = self.store(instruction)
                case Load():
                    during = self.load(instruction)
            if during > self.peak_bytes:
                self.peak_bytes, self.peak_index = during, self.index

    def end(self) -> None:
        """Check rules that hold once the last instruction has run."""
        if self.segment != len(self.graph.segments) - 1:
            raise InvalidPlan(
                f"the plan ends in segment {self.segment} (-1: none) but the graph has "
                f"{len(self.graph.segments)} segments, and each must be entered"
            )
        for op in self.graph.ops:
            if op.required and op.id not in self.first:
                raise InvalidPlan(f"the plan never computes {name_op(op)}, which is required")
        self.end_segment("the end of the plan")
        for value in self.graph.values:
            if value.fate == "handed_over" and value.id not in self.memory.handed_over:
                raise InvalidPlan(f"the plan never hands over the gradient {self.value(value.id)}")
            if value.fate == "returned" and not self.memory.may_be_read(value.id):
                raise InvalidPlan(
                    f"{self.value(value.id)} is returned to the caller but is not alive at the "
                    f"end of the plan ({self.memory.why_dead(value.id)})"
                )
        for number, choice in enumerate(self.graph.choices):
            self.check_choice(number, choice)

    def compute(self, step: Compute) -> int:
        """Check one computation and account its bytes; return those at its worst instant."""
        graph = self.graph
        if not 0 <= step.op < len(graph.ops):
            self.refuse(f"the graph has {len(graph.ops)} ops")
        op = graph.ops[step.op]
        if not 0 <= step.alternative < len(op.alternatives):
            self.refuse(f"the op has {len(op.alternatives)} alternatives")
        alternative = op.alternatives[step.alternative]
        if not 0 <= step.variant < len(alternative.variants):
            self.refuse(f"the alternative has {len(alternative.variants)} variants")
        for value in alternative.reads:
            if not self.memory.may_be_read(value):
                self.refuse(f"it reads {self.value(value)}, {self.memory.why_dead(value)}")
            if value in self.changed:
                self.refuse(
                    f"it reads {self.value(value)}, which instruction {self.changed[value]} has "
                    "changed"
                )
            self.away.arrive(value)
        self.changed.update(dict.fromkeys(op.changes, self.index))
        again = op.id in self.first
        if again:
            self.check_again(op, alternative)
        else:
            self.check_first(op, alternative)
            self.first[op.id] = step.alternative
            if self.last_compute[op.id] > self.index:
                self.memory.take(op.random_state_bytes)
        during = self.write(alternative, alternative.variants[step.variant].workspace_bytes)
        if again and self.last_compute[op.id] == self.index:
            self.memory.take(-op.random_state_bytes)
        return during

    def check_first(self, op: Op, alternative: Alternative) -> None:
        """Check rules of the first computation of an op alone."""
        if op.segment != self.segment:
            self.refuse(
                f"its first computation belongs into segment {op.segment}, "
                f"but the plan is in segment {self.segment}"
            )
        if alternative.use == "again":
            self.refuse(f"alternative {alternative.name!r} serves only later computations")

    def check_again(self, op: Op, alternative: Alternative) -> None:
        """Check rules of a recomputation alone."""
        segments = self.graph.segments
        if op.pinned is not None:
            self.refuse(f"the op may not be computed again: {op.pinned}")
        if alternative.use == "first":
            self.refuse(f"alternative {alternative.name!r} serves only the first computation")
        if segments[self.segment].program != segments[op.segment].program:
            self.refuse(
                f"an op of program {segments[op.segment].program} cannot be computed again in "
                f"segment {self.segment} of program {segments[self.segment].program}"
            )
        for value in alternative.writes:
            if self.graph.values[value].fate == "handed_over":
                self.refuse(f"it computes the gradient {self.value(value)} twice")
        for value in alternative.reads:
            for end in self.borders.replaced.get(value, ()):
                if op.segment <= end < self.segment:
                    self.refuse(
                        f"it reads {self.value(value)}, whose content was replaced when segment "
                        f"{end} ended, after the first computation in segment {op.segment}"
                    )

    def write(self, alternative: Alternative, workspace_bytes: int) -> int:
        """Count results of a computation; return the bytes at its worst instant."""
        made = alternative.writes
        if alternative.overwrites is not None:
            self.check_overwrite(alternative, alternative.overwrites)
            self.memory.drop(alternative.overwrites, self.index)
            self.memory.add(made[0])
            made = made[1:]
        second = (v for v in made if v in self.memory.alive)
        second_bytes = sum(self.graph.values[v].size_bytes for v in second)
        for value in made:
            self.memory.add(value)
        return self.memory.bytes + second_bytes + workspace_bytes

    def check_overwrite(self, alternative: Alternative, target: ValueId) -> None:
        """Check that an in-place computation takes over a value that may go."""
        made, alive = alternative.writes[0], self.memory.alive
        values = self.graph.values
        if target not in alive:
            self.refuse(f"it overwrites {self.value(target)}, {self.memory.why_dead(target)}")
        if values[target].fate != "none":
            self.refuse(f"it overwrites {self.value(target)}, which is {values[target].fate}")
        if values[target].size_bytes != values[made].size_bytes:
            self.refuse(
                f"it overwrites {self.value(target)} of {values[target].size_bytes} bytes by "
                f"{self.value(made)} of {values[made].size_bytes}"
            )
        if made in alive:
            self.refuse(f"it writes {self.value(made)} in place while an earlier instance is alive")

    def free(self, step: Free) -> int:
        """Check that a value may be released; return the bytes before."""
        self.check_leaving(step.value, "is never freed by the plan")
        before = self.memory.bytes
        self.away.arrive(step.value)
        self.memory.drop(step.value, self.index)
        return before

    def store(self, step: Store) -> int:
        """Check that a value may be copied to far memory; return the bytes near."""
        self.check_value(step.value)
        if self.plan.far is None:
            self.refuse("the plan names no far memory")
        self.check_leaving(step.value, "never leaves near memory")
        if self.graph.values[step.value].stays:
            self.refuse("it is no tensor of the device, and stays in near memory")
        if step.value in self.away.stored:
            self.refuse(f"it was stored at instruction {self.away.stored[step.value]}")
        self.away.store(step.value, self.index)
        return self.memory.bytes

    def load(self, step: Load) -> int:
        """Check that a value is far away and only there; return the bytes near from now on."""
        self.check_value(step.value)
        if step.value not in self.away.stored:
            self.refuse("it was never stored")
        if step.value in self.memory.alive:
            self.refuse("it is alive in near memory")
        self.away.load(step.value)
        self.memory.add(step.value)
        return self.memory.bytes

    def hand_over(self, step: HandOver) -> int:
        """Check that gradients are finished and leave once; return the bytes before."""
        if not step.values:
            self.refuse("it hands over nothing")
        memory = self.memory
        before = memory.bytes
        for value in step.values:
            self.check_value(value)
            fate = self.graph.values[value].fate
            if fate != "handed_over":
                self.refuse(f"{self.value(value)} has the fate {fate!r}")
            if value in memory.handed_over:
                self.refuse(
                    f"{self.value(value)} was handed over at instruction "
                    f"{memory.handed_over[value]}"
                )
            if value not in memory.alive:
                self.refuse(f"{self.value(value)} is {memory.why_dead(value)}")
            memory.hand_over(value, self.index)
            if self.plan.gradients == "accumulated":
                memory.drop(value, self.index)
        return before

    def enter(self, step: Enter) -> int:
        """Check the crossing into a segment; return the bytes while crossing."""
        if step.segment != self.segment + 1 or step.segment >= len(self.graph.segments):
            self.refuse(
                f"segments are entered once each in order, and the plan is in segment "
                f"{self.segment} of 0 to {len(self.graph.segments) - 1} (-1: none)"
            )
        self.end_segment(f"instruction {self.index}")
        memory = self.memory
        for value in [v for v in memory.alive if self.graph.values[v].fate == "written_back"]:
            memory.drop(value, self.index)
        self.segment = step.segment
        crossing = memory.bytes + self.graph.segments[step.segment].outside_bytes
        for value in self.borders.tangents[step.segment]:
            memory.add(value)
        return max(crossing, memory.bytes)

    def end_segment(self, where: str) -> None:
        """Check that values which the present segment must write back exist."""
        for value in self.borders.written_back.get(self.segment, ()):
            if value not in self.memory.alive:
                raise InvalidPlan(
                    f"{where}: segment {self.segment} ends, but {self.value(value)}, the new "
                    f"content of value {self.graph.values[value].replaces}, is "
                    f"{self.memory.why_dead(value)}"
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
                f"{name_op(self.graph.ops[op])} alternative {self.first.get(op, 'none')}"
                for op in ops
            )
            raise InvalidPlan(
                f"choice {number}: the plan takes {len(taken)} of its {len(choice.branches)} "
                f"branches and must take exactly one as a whole; it uses {used}"
            )

    def check_leaving(self, value: ValueId, never: str) -> None:
        """Check that a value is alive and may leave near memory; `never`: what others do not."""
        self.check_value(value)
        known = self.graph.values[value]
        if known.is_constant:
            self.refuse(f"a {known.role} is resident the whole step")
        if known.fate != "none":
            self.refuse(f"a value that is {known.fate} {never}")
        if value not in self.memory.alive:
            self.refuse(f"it is not alive: {self.memory.why_dead(value)}")

    def check_value(self, value: ValueId) -> None:
        if not 0 <= value < len(self.graph.values):
            self.refuse(f"the graph has {len(self.graph.values)} values")

    def refuse(self, reason: str) -> NoReturn:
        """Raise `InvalidPlan` with the instruction and the reason."""
        raise InvalidPlan(f"{self.describe(self.index)}: {reason}")

    def value(self, value: ValueId) -> str:
        return name_value(self.graph, self.producer, value)

    def named(self, value: ValueId) -> str:
        """Name a value for people, also where the graph has no such value."""
        known = 0 <= value < len(self.graph.values)
        return self.value(value) if known else f"value {value}"

    def describe(self, index: int) -> str:
        match self.plan.instructions[index]:
            case Compute(op) if 0 <= op < len(self.graph.ops):
                instruction_name = f"compute of {name_op(self.graph.ops[op])}"
            case Compute(op, alternative, variant):
                instruction_name = (
                    f"compute of op {op}, alternative {alternative}, variant {variant}"
                )
            case Free(value):
                instruction_name = f"free of {self.named(value)}"
            case HandOver(values):
                instruction_name = f"hand-over of {_list(values)}"
            case Enter(segment):
                instruction_name = f"entry of segment {segment}"
            case Store(value):
                instruction_name = f"store of {self.named(value)}"
            case Load(value):
                instruction_name = f"load of {self.named(value)}"
        return f"instruction {index} ({instruction_name})"


def _list(values: Iterable[ValueId]) -> str:
    """List ids for people, at most eight."""
    return first_of([str(value) for value in values], 8)
