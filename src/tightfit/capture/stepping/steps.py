"""The optimizer's step of each parameter as an op of the step, as soon as its gradient is final."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch
from torch import fx, nn

from tightfit.capture.captured import Call, Captured, parameters_of
from tightfit.capture.joint_graph import JointGraph
from tightfit.capture.nodes import base_of
from tightfit.capture.stepping.predicted import PredictedOp
from tightfit.capture.stepping.second_pass import SecondPass
from tightfit.errors import BadInput
from tightfit.graph.changes import need_before_changes
from tightfit.graph.ir import Alternative, Choice, Graph, Op, OpId, Value, ValueId
from tightfit.graph.liveness import producers, readers
from tightfit.graph.validate import validate_graph
from tightfit.torch_private import clipping

_STRETCH_BYTES = 1 << 19  # moved in the time that it takes to begin another stretch
_WORTH = 4  # times less workspace
_NUMBERS = 4  # that a norm and a factor work with
_BACKWARD = "backward"


@dataclass(frozen=True)
class Stretch:
    """A part of a parameter that is stepped by itself."""

    elements: int  # how many
    workspace_bytes: int  # of its step


class Stepper(Protocol):
    """Takes the steps of an optimizer, one parameter at a time."""

    @property
    def name(self) -> str:
        """The optimizer's, for people."""

    @property
    def max_norm(self) -> float | None:
        """To which norm all gradients together are clipped before any step; None: they are not."""

    def takes(self, parameter: torch.Tensor) -> bool:
        """Whether it steps a parameter."""

    def needs(self, parameter: torch.Tensor) -> tuple[int, int]:
        """Return the bytes of a parameter's state, and the workspace of its step."""

    def stretch(self, parameter: torch.Tensor) -> Stretch | None:
        """Return the stretches in which a parameter may be stepped, too; None: whole only."""

    def take(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Note which parameters, by their names, are stepped in backward from now on."""

    def before_backward(self) -> None:
        """Raise if a backward that is to begin may not step parameters."""

    def step(self, parameter: torch.Tensor, gradient: torch.Tensor, elements: int | None) -> None:
        """Take the step of one parameter, so many elements at a time; None: all at once."""


@dataclass(frozen=True)
class GradientNorm(PredictedOp):
    """Returns the norm of one gradient, as `clip_grad_norm_` computes it."""

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        return clipping.norm_of_gradient(gradient)


@dataclass(frozen=True)
class ClipFactor(PredictedOp):
    """Returns the factor of gradients, as `clip_grad_norm_` computes it."""

    max_norm: float = 1.0  # to which they are clipped

    def __call__(self, norms: Sequence[torch.Tensor]) -> torch.Tensor:
        total = torch.linalg.vector_norm(torch.stack(list(norms)), 2.0)
        return torch.clamp(self.max_norm / (total + 1e-6), max=1.0)


@dataclass(frozen=True, kw_only=True)
class ParameterStep(PredictedOp):
    """Takes the optimizer's step of one parameter inside a program."""

    stepper: Stepper  # knows the optimizer
    layout: str  # of its parameter: equal for steps that cost the same
    state_bytes: int  # of the parameter's state
    copies: bool  # whether others hold the gradient, too: an optimizer may write into its own
    elements: int | None = None  # how many are stepped at a time; None: all at once

    def __repr__(self) -> str:
        return f"step of {self.layout}" + f" by {self.elements}" * (self.elements is not None)

    def __call__(
        self, parameter: torch.Tensor, gradient: torch.Tensor, factor: torch.Tensor | None = None
    ) -> None:
        """Take the step, with the gradient laid out as autograd lays out that of a leaf.

        `factor`: scales the gradient.
        """
        if self.copies or not _is_laid_out_as(gradient, parameter):
            own = torch.empty_like(parameter) if _is_dense(parameter) else gradient.contiguous()
            gradient = own.copy_(gradient)
        if factor is not None:
            clipping.scale_gradient(gradient, factor)
        self.stepper.step(parameter, gradient, self.elements)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether each element of a tensor's memory is one of its own."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _is_laid_out_as(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether autograd would keep a gradient as it is: laid out as its parameter."""
    if not _is_dense(parameter):
        return gradient.is_contiguous()
    pairs = zip(parameter.shape, gradient.stride(), parameter.stride(), strict=True)
    return all(own == other for size, own, other in pairs if size != 1)


def taking_steps(
    joint: JointGraph, modules: Mapping[str, nn.Module], stepper: Stepper
) -> JointGraph:
    """Return a normalised step that keeps the gradients of an optimizer's parameters to itself."""
    members = parameters_of(joint, modules)
    placeholders = joint.placeholders
    taken = {
        position
        for _, position in joint.gradients
        if placeholders[position] in members and stepper.takes(members[placeholders[position]])
    }
    return dataclasses.replace(
        joint,
        gradients=tuple(pair for pair in joint.gradients if pair[1] not in taken),
        stepped=tuple(pair for pair in joint.gradients if pair[1] in taken),
    )


def with_parameter_steps(
    captured: Captured, modules: Mapping[str, nn.Module], stepper: Stepper
) -> Captured:
    """Return a step in which the optimizer steps each parameter as soon as that may be.

    A parameter's step reads it, its gradient and its state, and writes over it. It comes after all
    ops that need the old weight. They read it, or read a value computed from it and may be computed
    again. Backward ops that read it are not computed again. Where
    gradients are clipped, the second pass has ops for that.
    """
    members = parameters_of(captured.joint, modules)
    names = {
        captured.joint.sources[position].name: members[captured.joint.placeholders[position]]
        for _, position in captured.joint.stepped
    }
    stepper.take(names)
    order = {id(p): n for n, p in enumerate(p for m in modules.values() for p in m.parameters())}
    stepped = [node for node, _ in captured.joint.stepped]
    second = SecondPass(captured, stepped) if stepper.max_norm is not None else None
    return _Placing(captured, stepper, members, order, second).run()


@dataclass(frozen=True)
class _Added:
    """An op of the optimizer's step, with the calls of its alternatives, and its node."""

    op: Op
    calls: tuple[Call, ...]
    node: fx.Node


class _Placing:
    """Adds steps of parameters behind all other ops, and then moves each to its place."""

    def __init__(
        self,
        captured: Captured,
        stepper: Stepper,
        members: Mapping[fx.Node, torch.Tensor],
        order: Mapping[int, int],
        second: SecondPass | None,
    ) -> None:
        self.captured = captured = captured if second is None else second.captured
        self.second = second  # makes gradients again that are not kept until their norm is known
        self.stepper = stepper
        self.members = members
        self.order = order  # of parameters, by their identity
        self.sources = [self._sources(node) for node, _ in captured.joint.stepped]
        self.graph = _with_pins(captured, [node for nodes in self.sources for node in nodes])
        self.segment = next(s.id for s in reversed(self.graph.segments) if s.phase == _BACKWARD)
        self.values = list(captured.graph.values)
        self.value_of = dict(captured.value_of)
        self.added: list[_Added] = []

    def run(self) -> Captured:
        stepped = self.captured.joint.stepped
        readers_of = readers(self.graph)
        bases = [base_of(node) for nodes in self.sources for node in nodes]
        factor = None if self.stepper.max_norm is None else self._factor(self.stepper.max_norm)
        shared = {b for b in bases if bases.count(b) > 1 or readers_of[self.value_of[b]]}
        for (_, position), nodes in zip(stepped, self.sources, strict=True):
            gradients = [(node, base_of(node) in shared) for node in nodes]
            self._add_step(position, gradients, factor)
        ops = (*self.graph.ops, *(added.op for added in self.added))
        return self._in_place(
            msgspec.structs.replace(self.graph, ops=ops, values=tuple(self.values))
        )

    def _sources(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the nodes that a step may take a gradient from; the first of them is kept."""
        again = None if self.second is None else self.second.node_of(node)
        return (node,) if again is None else (node, again)

    def _factor(self, max_norm: float) -> fx.Node:
        """Add the norms of all gradients, and the factor that clips them; return its node."""
        joint = self.captured.joint
        places = {place: self.members[joint.placeholders[place]] for _, place in joint.stepped}
        self._refuse_to_clip(list(places.values()))
        ordered = sorted(joint.stepped, key=lambda pair: self.order[id(places[pair[1]])])
        numbers = _NUMBERS * self.graph.device.granularity_bytes
        norms = [
            self._add_number("norm", GradientNorm(numbers, places[place].nbytes), (node,))
            for node, place in ordered
        ]
        size = len(norms) * self.graph.device.granularity_bytes
        return self._add_number("clip", ClipFactor(size + numbers, size, max_norm), (norms,))

    def _refuse_to_clip(self, stepped: Sequence[torch.Tensor]) -> None:
        """Raise where not all gradients of parameters can be clipped together.

        Raises `BadInput`: names the reason.
        """
        joint = self.captured.joint
        others = [i for _, i in joint.gradients if joint.sources[i].kind == "parameter"]
        if others:
            raise BadInput(
                f"clip_grad_norm= clips all gradients together, but {self.stepper.name} does not "
                f"hold {joint.sources[others[0]].name}. Way out: an optimizer of all parameters "
                "that require a gradient"
            )
        if len({p.dtype for p in stepped}) > 1:
            raise BadInput(
                "clip_grad_norm= takes parameters of one type. Way out: clip after backward, "
                "without update_in_backward"
            )

    def _add_number(self, name: str, function: PredictedOp, arguments: tuple[Any, ...]) -> fx.Node:
        """Add an op that makes a number of some nodes; return its node."""
        node = self._node(function, name)
        value = len(self.values)
        size = self.graph.device.rounded(4)
        self.values.append(Value(id=value, name=f"{name} of gradients", size_bytes=size))
        call = Call(function, arguments, {}, (value,), False)
        self._add(f"step.{name}", (call,), node)
        self.value_of[node] = value
        return node

    def _node(self, function: PredictedOp, name: str) -> fx.Node:
        return fx.Graph().create_node("call_function", function, name=name)

    def _add(
        self, target: str, calls: tuple[Call, ...], node: fx.Node, changes: tuple[ValueId, ...] = ()
    ) -> None:
        """Add an op behind all others, that writes over some constants."""
        ways = []
        for number, call in enumerate(calls):
            own = (self.value_of[base_of(n)] for n in call.nodes())
            reads = tuple(dict.fromkeys((*own, *changes)))
            writes = tuple(v for v in call.outputs if v is not None)
            name = f"step.{number}" if number else "default"
            ways.append(Alternative(name=name, reads=reads, writes=writes))
        op = Op(
            id=len(self.graph.ops) + len(self.added),
            target=target,
            segment=self.segment,
            alternatives=tuple(ways),
            pinned="is a part of the optimizer's step",
            changes=changes,
        )
        self.added.append(_Added(op, calls, node))

    def _add_step(
        self, position: int, gradients: Sequence[tuple[fx.Node, bool]], factor: fx.Node | None
    ) -> None:
        """Add the step of a parameter; its gradients, each with whether others hold it, too."""
        joint = self.captured.joint
        placeholder = joint.placeholders[position]
        parameter = self.members[placeholder]
        clips = () if factor is None else (factor,)
        calls: list[Call] = []
        for node, is_shared in gradients:
            whole = self._step_of(parameter, node.meta["val"], copies=is_shared)
            calls += [
                Call(step, (placeholder, node, *clips), {}, (None,), False)
                for step in (whole, *self._in_stretches(whole, parameter))
            ]
        first: ParameterStep = calls[0].function  # type: ignore[assignment]
        state = self._state(joint.sources[position].name, first.state_bytes)
        changes = (self.value_of[placeholder], *state)
        self._add(f"step.{self.stepper.name}", tuple(calls), self._node(first, "step"), changes)

    def _step_of(
        self, parameter: torch.Tensor, gradient: torch.Tensor, *, copies: bool
    ) -> ParameterStep:
        state_bytes, workspace_bytes = self.stepper.needs(parameter)
        size = self.captured.graph.device.rounded(parameter.nbytes)
        is_copied = copies or not _is_laid_out_as(gradient, parameter)
        text = f"{self.stepper.name} {tuple(parameter.shape)} {parameter.dtype}"
        return ParameterStep(
            stepper=self.stepper,
            layout=f"{text} {state_bytes} {workspace_bytes} {is_copied}",
            state_bytes=state_bytes,
            workspace_bytes=workspace_bytes + size * is_copied,
            moved_bytes=3 * size + 2 * state_bytes + 2 * workspace_bytes,
            copies=copies,
        )

    def _in_stretches(
        self, whole: ParameterStep, parameter: torch.Tensor
    ) -> tuple[ParameterStep, ...]:
        """Return the same step a stretch at a time, where that takes much less memory."""
        stretch = self.stepper.stretch(parameter) if _is_dense(parameter) else None
        if stretch is None or whole.workspace_bytes < _WORTH * stretch.workspace_bytes:
            return ()
        pieces = -(-parameter.numel() // stretch.elements)
        return (
            dataclasses.replace(
                whole,
                workspace_bytes=stretch.workspace_bytes,
                moved_bytes=whole.moved_bytes + pieces * _STRETCH_BYTES,
                elements=stretch.elements,
            ),
        )

    def _state(self, name: str, size_bytes: int) -> tuple[ValueId, ...]:
        """Return the value of a parameter's state, if it has any.

        Its memory is resident around the step, whether it exists yet or not.
        """
        if not size_bytes:
            return ()
        self.values.append(
            Value(id=len(self.values), name=f"state of {name}", size_bytes=0, role="state")
        )
        return (len(self.values) - 1,)

    def _ordered(self, graph: Graph) -> list[_Added]:
        """Return all ops, each added op right behind the last of those it has to follow."""
        before, maker = need_before_changes(graph), producers(graph)
        followed = {
            added.op.id: {*before.get(added.op.id, ())}
            | {maker[v] for way in added.op.alternatives for v in way.reads if v in maker}
            for added in self.added
        }
        behind: dict[OpId, list[_Added]] = {}
        for added in self.added:
            for op in followed[added.op.id]:
                behind.setdefault(op, []).append(added)
        ordered: list[_Added] = []
        known = zip(self.graph.ops, self.captured.calls, self.captured.nodes, strict=True)
        for op, calls, node in known:
            ready = [_Added(op, calls, node)]
            while ready:
                now = ready.pop(0)
                ordered.append(now)
                for added in behind.get(now.op.id, ()):
                    followed[added.op.id].discard(now.op.id)
                    ready += [] if followed[added.op.id] else [added]
        return ordered

    def _in_place(self, graph: Graph) -> Captured:
        """Return the step with each of the ops that were added where it may run first."""
        ordered = self._ordered(graph)
        moved = {entry.op.id: place for place, entry in enumerate(ordered)}
        ops = tuple(
            msgspec.structs.replace(
                entry.op,
                id=place,
                partner=None if entry.op.partner is None else moved[entry.op.partner],
            )
            for place, entry in enumerate(ordered)
        )
        choices = tuple(
            Choice(branches=tuple(tuple((moved[op], way) for op, way in b) for b in c.branches))
            for c in graph.choices
        )
        return dataclasses.replace(
            self.captured,
            graph=validate_graph(msgspec.structs.replace(graph, ops=ops, choices=choices)),
            calls=tuple(entry.calls for entry in ordered),
            nodes=tuple(entry.node for entry in ordered),
            value_of=self.value_of,
            stepper=self.stepper,
        )


def _with_pins(captured: Captured, sources: Sequence[fx.Node]) -> Graph:
    """Return a graph in which no backward op runs again that would hold up a step.

    Those are ops that read a stepped parameter, and ops of which gradients of stepped parameters
    alone are made. While one of them may run again, all that it needs is needed. `sources`: the
    nodes that gradients are taken from.
    """
    graph, joint = captured.graph, captured.joint
    stepped = {captured.value_of[joint.placeholders[place]] for _, place in joint.stepped}
    read_by = readers(graph)
    gradients = {captured.value_of[base_of(node)] for node in sources}
    for_steps: set[OpId] = set()
    ops = list(graph.ops)
    for op in reversed(graph.ops):
        if graph.segments[op.segment].phase != _BACKWARD:
            break
        made = {v for way in op.alternatives for v in way.writes}
        used = {reader for value in made for reader in read_by[value]}
        if (used or made & gradients) and used <= for_steps:
            for_steps.add(op.id)
        read = stepped.intersection(v for way in op.alternatives for v in way.reads)
        if op.pinned is None and (read or op.id in for_steps):
            why = "reads a parameter" if read else "makes a part of the gradient of one"
            ops[op.id] = msgspec.structs.replace(op, pinned=f"{why} that is stepped")
    return msgspec.structs.replace(graph, ops=tuple(ops))
