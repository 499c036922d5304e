"""From a plan to two Python programs: a forward function and a backward generator.

The programs are flat code generated from the plan's instructions, one line each: a compute is a
call, a free is ``name = None``, a hand-over is a ``yield``. Views are made where they are read and
dropped with the value they view. Nothing else holds a tensor, so memory follows the plan.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tightfit.capture.captured import Call, Captured
from tightfit.capture.nodes import base_of, is_getitem, is_random, is_view
from tightfit.errors import InvalidPlan
from tightfit.graph.ir import OpId, ValueId
from tightfit.plan.plan import Compute, Enter, Free, HandOver, Plan

__all__ = ["Program", "lower", "write_back"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Program:
    """A lowered plan.

    Parameters
    ----------
    forward : callable
        Takes the list of placeholder tensors (emptied), returns (raw outputs, saved).
    backward : callable
        A generator function of (saved, tangents), both emptied; yields lists of gradients.
    groups : tuple of tuple of int
        For each yielded list, the placeholder positions the gradients belong to.
    late_reads : dict of int to int
        For placeholders the backward still reads after their gradient was handed over: the last
        group before which they are read.
    source : str
        The generated code.
    names : mapping of str to object
        What the code takes from outside: operators, constants, access to generators. A compiler
        runs the code with others in their place.
    """

    forward: Callable[[list[Any]], tuple[list[Any], list[Any]]]
    backward: Callable[[list[Any], list[Any]], Iterator[list[torch.Tensor]]]
    groups: tuple[tuple[int, ...], ...]
    late_reads: dict[int, int]
    source: str
    names: Mapping[str, Any]


def lower(
    captured: Captured, plan: Plan, *, clock: Callable[[OpId, int], None] | None = None
) -> Program:
    """Generate the programs of a verified plan.

    Parameters
    ----------
    captured : Captured
        The step the plan was made for, with its calls.
    plan : Plan
        Verified.
    clock : callable, optional
        Called with (op, alternative) right after each compute, to time them in a real step.

    Raises
    ------
    InvalidPlan
        If the plan changes the order in which random operators first draw.
    """
    _check_random_order(captured, plan)
    return _Lowering(captured, plan, clock).run()


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


class _Code:
    """The lines of one function, with the names it takes from outside."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.views: dict[fx.Node, str] = {}
        self.views_on: dict[ValueId, list[fx.Node]] = {}
        self.constants_used: dict[int, int] = {}

    def emit(self, line: str) -> None:
        self.lines.append("    " + line)


class _Lowering:
    def __init__(
        self, captured: Captured, plan: Plan, clock: Callable[[OpId, int], None] | None
    ) -> None:
        self.captured = captured
        self.graph = captured.graph
        self.plan = plan
        self.clock = clock
        self.forward = _Code()
        self.backward = _Code()
        self.code = self.forward
        self.names: dict[str, Any] = {"clock": clock, "write_back": write_back}
        self.known: dict[int, str] = {}
        self.home: dict[ValueId, _Code] = {}  # where the live instance of a value was made
        self.imported: set[ValueId] = set()
        self.saved: list[str] = []
        self.saved_names: set[str] = set()
        self.states: dict[OpId, _Code] = {}
        self.counts: dict[OpId, int] = {}
        self.total = {op: n for op, n in _compute_counts(plan).items() if n > 1}
        joint = captured.joint
        self.placeholders = joint.placeholders
        self.position = {n: i for i, n in enumerate(self.placeholders)}
        self.gradient_of = {captured.value_of[base_of(n)]: (n, i) for n, i in joint.gradients}
        self.groups: list[tuple[int, ...]] = []
        self.returns = ""

    def run(self) -> Program:
        for step in self.plan.instructions:
            match step:
                case Compute():
                    self._compute(step)
                case Free(value):
                    self._drop(value)
                case HandOver(values):
                    self._hand_over(values)
                case Enter(segment):
                    if segment > 0:
                        self._cross()
        if self.code is self.forward:
            self._cross()
        return self._assemble()

    # -- instructions -------------------------------------------------------------------------

    def _compute(self, step: Compute) -> None:
        op = self.graph.ops[step.op]
        call = self.captured.calls[step.op][step.alternative]
        alternative = op.alternatives[step.alternative]
        self.counts[op.id] = self.counts.get(op.id, 0) + 1
        again = self.counts[op.id] > 1
        random = op.id in self.total and is_random(self.captured.nodes[op.id])
        expression = self._call(call)
        if random:
            self._before_random(op.id, again)
        names, stale = self._output_names(call, alternative.overwrites)
        target = ", ".join(names) + ("," if call.is_tuple and len(names) == 1 else "")
        self.code.emit(f"{target or '_'} = {expression}")
        if "_" in names or not names:
            self.code.emit("_ = None")
        if stale:
            self.code.emit(" = ".join(stale) + " = None")
        if random and again:
            self.code.emit(f"{self._generator_access(op.id)[1]}(other_state)")
            self.code.emit("other_state = None")
            if self.counts[op.id] == self.total[op.id]:
                self.code.emit(f"s{op.id} = None")
        if self.clock is not None:
            self.code.emit(f"clock({op.id}, {step.alternative})")

    def _output_names(self, call: Call, overwritten: ValueId | None) -> tuple[list[str], list[str]]:
        stale = self._forget(overwritten) if overwritten is not None else []
        names = []
        for value in call.outputs:
            if value is None or value in self.home:
                names.append("_")
            else:
                self.home[value] = self.code
                names.append(f"v{value}")
        return names, stale

    def _before_random(self, op: OpId, again: bool) -> None:
        get, set_ = self._generator_access(op)
        if not again:
            self.code.emit(f"s{op} = {get}()")
            self.states[op] = self.code
            return
        if self.states[op] is not self.code:
            self._save(f"s{op}", f"s{op}")
            self.states[op] = self.code
        self.code.emit(f"other_state = {get}()")
        self.code.emit(f"{set_}(s{op})")

    def _generator_access(self, op: OpId) -> tuple[str, str]:
        """Return the names of what reads and sets the generator an op draws from."""
        node = self.captured.nodes[op]
        own = node.kwargs.get("generator")
        if own is not None:
            name = self._literal(own)
            return f"{name}.get_state", f"{name}.set_state"
        value = node.meta["val"]
        device = (value[0] if isinstance(value, tuple | list) else value).device
        self.names["get_state"], self.names["set_state"] = _generator_access(device)
        return "get_state", "set_state"

    def _drop(self, value: ValueId) -> None:
        names = self._forget(value)
        if names:
            self.code.emit(" = ".join(names) + " = None")

    def _forget(self, value: ValueId) -> list[str]:
        """Forget the live instance of a value; return the local names that hold it."""
        names = [self.code.views.pop(n) for n in self.code.views_on.pop(value, ())]
        home = self.home.pop(value, None)
        if home is self.code or value in self.imported:
            names.append(f"v{value}")
        self.imported.discard(value)
        return names

    def _hand_over(self, values: Sequence[ValueId]) -> None:
        pairs = [self.gradient_of[v] for v in values]
        expressions = [self._reference(node) for node, _ in pairs]
        self.code.emit(f"gradients = [{', '.join(expressions)}]")
        names = [name for value in values for name in self._forget(value)]
        self.code.emit(" = ".join(names) + " = None")
        self.code.emit("yield gradients")
        self.code.emit("gradients = None")
        if self.clock is not None:
            self.code.emit("clock(-1, 0)")
        self.groups.append(tuple(position for _, position in pairs))

    def _cross(self) -> None:
        """End the forward function: update buffers, fix outputs, go on in the backward one."""
        joint = self.captured.joint
        for node, position in joint.write_backs:
            source = self._reference(node)
            self.forward.constants_used[position] = 0
            self.code.emit(f"write_back(p{position}, {source})")
            self._drop(self.captured.value_of[base_of(node)])
        outputs = [
            self._reference(n) if isinstance(n, fx.Node) else self._literal(n)
            for n in joint.raw_outputs
        ]
        self.returns = f"[{', '.join(outputs)}]"
        self.code = self.backward
        for node, source in zip(self.placeholders, joint.sources, strict=True):
            if source.kind == "tangent":
                self.home[self.captured.value_of[node]] = self.backward

    # -- expressions --------------------------------------------------------------------------

    def _call(self, call: Call) -> str:
        arguments = [self._literal(a) for a in call.args]
        arguments += [f"{k}={self._literal(v)}" for k, v in call.kwargs.items()]
        return f"{self._constant(call.function)}({', '.join(arguments)})"

    def _literal(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._reference(value)
        if isinstance(value, list | fx.immutable_collections.immutable_list):
            return "[" + ", ".join(self._literal(v) for v in value) + "]"
        if isinstance(value, tuple):
            return "(" + "".join(self._literal(v) + ", " for v in value) + ")"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        if isinstance(value, float) and math.isfinite(value):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        key = id(value)
        if key not in self.known:
            self.known[key] = f"c{len(self.known)}"
            self.names[self.known[key]] = value
        return self.known[key]

    def _reference(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            return self._constant(getattr(self.captured.joint.module, str(node.target)))
        if is_view(node):
            return self._view(node)
        if node in self.position:
            position = self.position[node]
            if self.captured.joint.sources[position].kind != "tangent":
                self.code.constants_used[position] = len(self.groups)
                return f"p{position}"
        return self._value(self.captured.value_of[node])

    def _value(self, value: ValueId) -> str:
        home = self.home.get(value)
        if home is None:
            name = self.graph.values[value].name
            raise InvalidPlan(f"the plan reads value {value} ({name}) while it is not alive")
        if home is not self.code and value not in self.imported:
            keeps = self.graph.values[value].fate == "returned"
            self._save(f"v{value}", f"v{value}.detach()" if keeps else f"v{value}")
            self.imported.add(value)
        return f"v{value}"

    def _save(self, name: str, expression: str) -> None:
        if name not in self.saved_names:
            self.saved_names.add(name)
            self.saved.append(expression)

    def _view(self, node: fx.Node) -> str:
        if node in self.code.views:
            return self.code.views[node]
        if is_getitem(node):
            expression = f"{self._reference(node.args[0])}[{node.args[1]}]"  # type: ignore
        else:
            # values may have other strides than the trace saw: reshape as eager does
            viewed = node.target in (aten.view.default, aten._unsafe_view.default)
            target = aten.reshape.default if viewed else node.target
            call = Call(target, node.args, dict(node.kwargs), (), False)  # type: ignore
            expression = self._call(call)
        name = f"w{len(self.code.lines)}"
        self.code.emit(f"{name} = {expression}")
        self.code.views[node] = name
        base = base_of(node)
        if base in self.captured.value_of:
            self.code.views_on.setdefault(self.captured.value_of[base], []).append(node)
        return name

    # -- assembly -----------------------------------------------------------------------------

    def _assemble(self) -> Program:
        joint = self.captured.joint
        inputs = [f"p{i}" for i, s in enumerate(joint.sources) if s.kind != "tangent"]
        constants = [f"p{i}" for i in self.backward.constants_used]
        saved_values = [e.removesuffix(".detach()") for e in self.saved]
        tangents = [
            f"v{self.captured.value_of[n]}"
            for n, s in zip(self.placeholders, joint.sources, strict=True)
            if s.kind == "tangent"
        ]
        lines = ["def forward(inputs):", *_unpack(inputs, "inputs"), *self.forward.lines]
        lines += [f"    return {self.returns}, [{', '.join([*constants, *self.saved])}]", ""]
        lines += ["def backward(saved, tangents):"]
        lines += [*_unpack([*constants, *saved_values], "saved"), *_unpack(tangents, "tangents")]
        lines += [*self.backward.lines, "    return", "    yield", ""]
        source = "\n".join(lines)
        filename = f"<tightfit {self.graph.name} {self.plan.graph} {id(self.plan)}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        functions = dict(self.names)
        exec(compile(source, filename, "exec"), functions)
        return Program(
            functions["forward"],
            functions["backward"],
            tuple(self.groups),
            self._late_reads(),
            source,
            self.names,
        )

    def _late_reads(self) -> dict[int, int]:
        handed = {i: number for number, group in enumerate(self.groups) for i in group}
        reads = self.backward.constants_used
        return {i: last for i, last in reads.items() if i in handed and last > handed[i]}


def _unpack(names: Sequence[str], source: str) -> list[str]:
    lines = [f"    [{', '.join(names)}] = {source}"] if names else []
    return [*lines, f"    {source}.clear()"]


def _compute_counts(plan: Plan) -> dict[OpId, int]:
    counts: dict[OpId, int] = {}
    for step in plan.instructions:
        if isinstance(step, Compute):
            counts[step.op] = counts.get(step.op, 0) + 1
    return counts


def write_back(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Put a new value into a buffer, which takes its shape if it had another, as eager's does."""
    if buffer.shape != value.shape:
        buffer.resize_(value.shape)
    buffer.copy_(value)


def _generator_access(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return how to read and set the state of the generator a device draws from."""
    if device.type == "cuda":
        return (
            lambda: torch.cuda.get_rng_state(device),
            lambda state: torch.cuda.set_rng_state(state, device),
        )
    return torch.get_rng_state, torch.set_rng_state
