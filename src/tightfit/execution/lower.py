"""From a plan to two Python programs: a forward function and a backward generator.

The programs are flat code generated from the plan's instructions, one line each: a compute is a
call, a free is ``name = None``, a hand-over is a ``yield``. Nothing but the names in the code
holds a tensor, so memory follows the plan. A plan with moves becomes functions that take their far
memory as ``far`` (`tightfit.execution.far`).
"""

from __future__ import annotations

import linecache
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import fx

from tightfit.allocator.devices import get_state, set_state
from tightfit.capture.captured import Captured
from tightfit.capture.nodes import base_of, is_random
from tightfit.capture.updates import are_statistics
from tightfit.errors import InvalidPlan
from tightfit.execution.changing import copy_uncounted
from tightfit.execution.sums import first_sums
from tightfit.execution.writing import Function, Writer
from tightfit.graph.ir import OpId, ValueId
from tightfit.plan.plan import Compute, Enter, Free, HandOver, Load, Plan, Store
from tightfit.torch_private import core as private

Forward: TypeAlias = Callable[[list[Any]], tuple[list[Any], list[Any]]]
Backward: TypeAlias = Callable[..., Iterator[list[torch.Tensor]]]


@dataclass(frozen=True)
class Program:
    """A lowered plan."""

    # Takes the list of placeholder tensors (emptied), returns (raw outputs, saved)
    forward: Forward
    # A generator function of (saved, tangents), both emptied; yields lists of gradients. A third
    # argument is called with the placeholder and the first term of each gradient of `sums`, and
    # returns the first value of that gradient.
    backward: Backward
    # For each yielded list, the placeholder positions the gradients belong to
    groups: tuple[tuple[int, ...], ...]
    # Placeholders that the backward still reads after their gradient was handed over, each with the
    # last group before which it is read
    late_reads: tuple[tuple[int, int], ...]
    source: str  # the generated code
    # Names that the code takes from outside: operators, constants, access to generators. A compiler
    # runs the code with others in their place.
    names: Mapping[str, Any]
    # Placeholders that the backward reads, in the order in which they come first among saved
    # values; (): not known
    kept: tuple[int, ...] = ()
    # Placeholders whose gradients are sums that can go on where those of other calls ended
    sums: frozenset[int] = frozenset()
    # Whether gradients of outputs must have the strides that were traced
    fixes_strides: bool = False


def lower(
    captured: Captured,
    plan: Plan,
    *,
    clock: Callable[[OpId, int], None] | None = None,
    turn: Callable[[int], None] | None = None,
    turns: Collection[int] = (),
) -> Program:
    """Generate the programs of a verified plan.

    `clock`: called with (op, alternative) right after each compute, to time them in a real step.
    `turn`: called right before some computes, with the number of the instruction. `turns`: those
    before which it is called. Raises `InvalidPlan` if the plan changes the order in which random
    operators first draw.
    """
    _check_random_order(captured, plan)
    return _Lowering(captured, plan, clock, turn, frozenset(turns)).run()


def _check_random_order(captured: Captured, plan: Plan) -> None:
    seen: set[OpId] = set()
    last = -1
    for step in plan.instructions:
        if isinstance(step, Compute) and step.op not in seen:
            seen.add(step.op)
            if is_random(captured.nodes[step.op]):
                if step.op < last:
                    raise InvalidPlan(
                        f"op {step.op} draws random numbers and is first computed after op {last},"
                        " which eager computes later: results would differ"
                    )
                last = step.op


class _Lowering:
    """Writes the lines of each instruction of a plan."""

    def __init__(
        self,
        captured: Captured,
        plan: Plan,
        clock: Callable[[OpId, int], None] | None,
        turn: Callable[[int], None] | None,
        turns: frozenset[int],
    ) -> None:
        self.captured = captured
        self.plan = plan
        self.clock = clock
        self.turns = turns
        own = {"clock": clock, "turn": turn}
        own |= {"write_back": write_back, "write_statistics": copy_uncounted}
        self.writer = Writer(captured, own)
        self.draws = _RepeatedDraws(captured, plan, self.writer)
        self.first_sums = first_sums(captured, plan)
        # Gradients with their placeholders, by the value that they are or are views of
        self.gradients_in: defaultdict[ValueId, list[tuple[fx.Node, int]]] = defaultdict(list)
        for node, position in captured.joint.gradients:
            self.gradients_in[captured.value_of[base_of(node)]].append((node, position))
        self.last_reads = _last_reads(captured, plan)
        self.last_uses = _last_uses_of_returned(captured, plan)
        self.finished: list[ValueId] = []  # gradients that are to be handed over
        self.handed: set[int] = set()  # placeholders whose gradients were, where that matters
        self.moves = _Moves(plan, self.writer, is_timed=clock is not None)
        self.returns = ""

    def run(self) -> Program:
        for number, step in enumerate(self.plan.instructions):
            match step:
                case Compute():
                    self._compute(number, step)
                    self._free_returned(number)
                case Free(value):
                    self.moves.end(value)
                    self.writer.release(value)
                case HandOver(values):
                    self.finished += values
                    self._hand_over(number)
                case Enter(segment):
                    if segment > 0:
                        self._cross()
                case Store(value):
                    self.moves.store(value)
                case Load(value):
                    self.moves.load(number, value)
        if self.writer.function is self.writer.forward:
            self._cross()
        self._hand_over(len(self.plan.instructions))
        return self._assemble()

    def _compute(self, number: int, step: Compute) -> None:
        call = self.captured.calls[step.op][step.alternative]
        way = self.captured.graph.ops[step.op].alternatives[step.alternative]
        overwritten = way.overwrites
        function = self.writer.function
        self.moves.arrive(way.reads)
        self.moves.end(overwritten)
        first = self.first_sums.get(step.op)
        if first is None:
            expression = self.writer.call(call)
        else:
            expression = self.writer.call(call, first.term, f"begin_sum({first.position}, {{}})")
        afterwards = self.draws.before(step.op)
        stale = self.writer.forget(overwritten) if overwritten is not None else []
        names = [self._output_name(value) for value in call.outputs]
        target = ", ".join(names) + ("," if call.is_tuple and len(names) == 1 else "")
        if number in self.turns:
            function.emit(f"turn({number})")
        function.emit(f"{target or '_'} = {expression}")
        if "_" in names or not names:
            function.emit("_ = None")
        if stale:
            function.emit_release(stale)
        for line in afterwards:
            function.emit(line)
        if self.clock is not None:
            function.emit(f"clock({step.op}, {step.alternative})")

    def _free_returned(self, now: int) -> None:
        """Free in the backward values that the forward has returned and nothing more reads.

        A plan counts it to the end, as the caller may hold it.
        """
        if self.writer.function is self.writer.backward:
            for value in self.last_uses.get(now, ()):
                self.writer.release(value)

    def _output_name(self, value: ValueId | None) -> str:
        """Return the name of an output; a value that is alive already is not held twice."""
        if value is None or self.writer.is_alive(value):
            return "_"
        return self.writer.make(value)

    def _hand_over(self, now: int) -> None:
        """Hand over finished gradients; inputs may be changed as soon as their gradient exists.

        Fresh gradients are held to the end in any case: gradients of inputs that are still read
        wait for that.
        """
        values = self.finished
        if self.plan.gradients == "fresh":
            values = [v for v in values if self._last_read_of_inputs(v) < now]
            values = self._in_turn(values)
        if not values:
            return
        self.finished = [v for v in self.finished if v not in values]
        pairs = [pair for v in values for pair in self.gradients_in[v]]
        function = self.writer.function
        gradients = [self.writer.reference(node) for node, _ in pairs]
        function.emit_hand_over(gradients, [n for v in values for n in self.writer.forget(v)])
        if self.clock is not None:
            function.emit("clock(-1, 0)")
        function.groups.append(tuple(position for _, position in pairs))

    def _last_read_of_inputs(self, value: ValueId) -> int:
        """Return when inputs with gradients in a value are read for the last time."""
        return max(self.last_reads.get(position, -1) for _, position in self.gradients_in[value])

    def _in_turn(self, values: list[ValueId]) -> list[ValueId]:
        """Return the finished gradients whose turn it is, in order."""
        turns = self.captured.in_turn
        if not turns:
            return values
        ready: list[ValueId] = []
        waiting = [*values]
        while True:
            now = [v for v in waiting if self._has_turn(v, turns)]
            if not now:
                return ready
            ready += now
            self.handed.update(i for v in now for _, i in self.gradients_in[v])
            waiting = [v for v in waiting if v not in now]

    def _has_turn(self, value: ValueId, turns: Mapping[int, int]) -> bool:
        positions = {position for _, position in self.gradients_in[value]}
        before = {turns[position] for position in positions if position in turns}
        return before <= self.handed | positions

    def _cross(self) -> None:
        """End the forward function: update buffers, fix outputs, go on in the backward function."""
        joint, writer = self.captured.joint, self.writer
        for is_counted, pairs in self._write_backs_together():
            buffers = ", ".join(f"p{position}" for _, position in pairs)
            values = ", ".join(writer.reference(node) for node, _ in pairs)
            write = "write_back" if is_counted else "write_statistics"
            writer.function.emit(f"{write}([{buffers}], [{values}])")
            for node, _ in pairs:
                writer.release(self.captured.value_of[base_of(node)])
        self.returns = f"[{', '.join(self.writer.literal(n) for n in joint.raw_outputs)}]"
        self.writer.go_on_in_backward()

    def _write_backs_together(self) -> Iterable[tuple[bool, list[tuple[fx.Node, int]]]]:
        """Return new values of buffers in groups that one kernel copies: each of one type.

        In addition whether plain PyTorch counts that as a change: not of a batch norm's statistics.
        """
        groups: dict[Any, list[tuple[fx.Node, int]]] = {}
        for node, position in self.captured.joint.write_backs:
            value = node.meta["val"]
            kind = not are_statistics(node), value.dtype, value.device
            groups.setdefault(kind, []).append((node, position))
        return ((kind[0], pairs) for kind, pairs in groups.items())

    def _assemble(self) -> Program:
        source = self._source()
        filename = f"<tightfit {self.captured.graph.name} {self.plan.graph} {id(self.plan)}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        names = self.writer.names
        functions = dict(names)
        exec(compile(source, filename, "exec"), functions)
        return Program(
            functions["forward"],
            functions["backward"],
            tuple(self.writer.backward.groups),
            _late_reads(self.writer.backward),
            source,
            MappingProxyType(names),
            tuple(self.writer.backward.last_reads),
            frozenset(first.position for first in self.first_sums.values()),
            self._fixes_strides(),
        )

    def _fixes_strides(self) -> bool:
        """Whether any operator on gradients runs by an alternative, which fixes its strides."""
        others = [self.captured.nodes[s.op] for s in self.plan.computes if s.alternative]
        return bool(others) and not self.captured.joint.backward.isdisjoint(others)

    def _source(self) -> str:
        joint, writer = self.captured.joint, self.writer
        inputs = [f"p{i}" for i, s in enumerate(joint.sources) if s.kind != "tangent"]
        constants = [f"p{i}" for i in writer.backward.last_reads]
        tangents = [f"v{self.captured.value_of[node]}" for node, _ in joint.tangents]
        kept = ", ".join([*constants, *writer.saved.values()])
        far = ", *, far" if self.plan.far is not None else ""
        lines = [
            f"def forward(inputs{far}):",
            *_unpack(inputs, "inputs"),
            *writer.forward.lines,
            f"    return {self.returns}, [{kept}]",
            "",
            f"def backward(saved, tangents, begin_sum=lambda position, term: term{far}):",
            *_unpack([*constants, *writer.saved], "saved"),
            *_unpack(tangents, "tangents"),
            *writer.backward.lines,
            "    return",
            "    yield",
            "",
        ]
        return "\n".join(lines)


class _Moves:
    """Lets values be stored and loaded, and ops that need the end of that wait for it."""

    def __init__(self, plan: Plan, writer: Writer, *, is_timed: bool) -> None:
        steps = enumerate(plan.instructions)
        self._last_loads = {step.value: n for n, step in steps if isinstance(step, Load)}
        self._writer = writer
        self._is_timed = is_timed
        self._storing: set[ValueId] = set()
        self._loading: set[ValueId] = set()

    def store(self, value: ValueId) -> None:
        self._writer.function.emit(f"far.store({value}, {self._writer.name(value)})")
        self._storing.add(value)

    def load(self, number: int, value: ValueId) -> None:
        """Begin to bring a value back, as an instruction of the plan says."""
        last = ", is_last=True" if self._last_loads[value] == number else ""
        self._writer.function.emit(f"{self._writer.make(value)} = far.load({value}{last})")
        self._loading.add(value)

    def arrive(self, values: Iterable[ValueId]) -> None:
        """Wait for values that are on their way back."""
        for value in values:
            if value in self._loading:
                self.end(value)

    def end(self, value: ValueId | None) -> None:
        """Wait until no transfer of a value is in flight."""
        if value in self._storing or value in self._loading:
            self._writer.function.emit(f"far.wait({value})")
            if self._is_timed:
                self._writer.function.emit("clock(-1, 0)")
        self._storing.discard(value)
        self._loading.discard(value)


class _RepeatedDraws:
    """Lets ops that draw random numbers draw the same numbers when they are computed again."""

    def __init__(self, captured: Captured, plan: Plan, writer: Writer) -> None:
        counts = Counter(step.op for step in plan.instructions if isinstance(step, Compute))
        nodes = captured.nodes
        self._left = {op: n for op, n in counts.items() if n > 1 and is_random(nodes[op])}
        self._nodes = nodes
        self._writer = writer
        self._state_in: dict[OpId, Function] = {}  # which function holds an op's state

    def before(self, op: OpId) -> list[str]:
        """Keep the state that an op draws from, or go back to it; return the lines for after it."""
        if op not in self._left:
            return []
        self._left[op] -= 1
        function = self._writer.function
        value = self._nodes[op].meta["val"]
        device = (value[0] if isinstance(value, tuple | list) else value).device
        access = {"get_state": partial(get_state, device), "set_state": partial(set_state, device)}
        self._writer.take(**access)
        holder = self._state_in.get(op)
        self._state_in[op] = function
        if holder is None:
            function.emit(f"s{op} = get_state()")
            return []
        if holder is not function:
            self._writer.keep_for_backward(f"s{op}", f"s{op}")
        function.emit("other_state = get_state()")
        function.emit(f"set_state(s{op})")
        after = ["set_state(other_state)", "other_state = None"]
        return after if self._left[op] else [*after, f"s{op} = None"]


def _last_reads(captured: Captured, plan: Plan) -> dict[int, int]:
    """Return the last instruction of a plan that reads each placeholder, by its position."""
    positions = {node: i for i, node in enumerate(captured.joint.placeholders)}
    last: dict[int, int] = {}
    for number, step in enumerate(plan.instructions):
        if not isinstance(step, Compute):
            continue
        call = captured.calls[step.op][step.alternative]
        arguments = fx.node.map_arg((call.args, call.kwargs), base_of)
        for node in private.pytree.tree_leaves(arguments):
            if isinstance(node, fx.Node) and node in positions:
                last[positions[node]] = number
    return last


def _last_uses_of_returned(captured: Captured, plan: Plan) -> dict[int, list[ValueId]]:
    """Return which returned values each instruction of a plan is the last to read."""
    returned = {value.id for value in captured.graph.values if value.fate == "returned"}
    last: dict[ValueId, int] = {}
    for number, step in enumerate(plan.instructions):
        if isinstance(step, Compute):
            reads = captured.graph.ops[step.op].alternatives[step.alternative].reads
            last.update(dict.fromkeys(returned.intersection(reads), number))
    found: dict[int, list[ValueId]] = {}
    for value, number in last.items():
        found.setdefault(number, []).append(value)
    return found


def _unpack(names: Sequence[str], source: str) -> list[str]:
    lines = [f"    [{', '.join(names)}] = {source}"] if names else []
    return [*lines, f"    {source}.clear()"]


def _late_reads(backward: Function) -> tuple[tuple[int, int], ...]:
    handed = {i: number for number, group in enumerate(backward.groups) for i in group}
    reads = backward.last_reads.items()
    return tuple((i, last) for i, last in reads if i in handed and last > handed[i])


def write_back(buffers: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Put new values into buffers, which take their shape if they had another, as eager's do."""
    for buffer, value in zip(buffers, values, strict=True):
        if buffer.shape != value.shape:
            if buffer.numel() < value.numel():
                buffer.resize_(value.shape)
            else:
                buffer.as_strided_(value.shape, value.stride())
    private.foreach_copy(buffers, values)
