"""The optimizer's step of each parameter as an op of the step, as soon as its gradient is final."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
from torch import fx, nn

from tightfit.capture.captured import Call, Captured, parameters_of
from tightfit.capture.joint_graph import JointGraph
from tightfit.capture.nodes import base_of
from tightfit.costs.measured.call import Measurement
from tightfit.graph.changes import need_before_changes
from tightfit.graph.ir import Alternative, Choice, Graph, Op, OpId, Value, ValueId
from tightfit.graph.liveness import producers, readers
from tightfit.graph.validate import validate_graph

__all__ = ["ParameterStep", "Stepper", "taking_steps", "with_parameter_steps"]

_BYTES_PER_S = 5e9  # that a step of a parameter reads and writes, until steps have been timed
_STRETCH_BYTES = 1 << 19  # moved in the time that it takes to begin another stretch
_WORTH = 4  # times less workspace
_BACKWARD = "backward"


@dataclass(frozen=True)
class Stretch:
    """A part of a parameter that is stepped by itself.

    Parameters
    ----------
    elements : int
        How many.
    workspace_bytes : int
        What a step of it works with.
    """

    elements: int
    workspace_bytes: int


class Stepper(Protocol):
    """Takes the steps of an optimizer, one parameter at a time."""

    @property
    def name(self) -> str:
        """The optimizer's, for people."""
        ...

    def takes(self, parameter: torch.Tensor) -> bool:
        """Whether it steps a parameter."""
        ...

    def needs(self, parameter: torch.Tensor) -> tuple[int, int]:
        """Return the bytes of a parameter's state, and what its step works with besides."""
        ...

    def stretch(self, parameter: torch.Tensor) -> Stretch | None:
        """Return by what stretches a parameter may be stepped, too; None: whole only."""
        ...

    def take(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Note which parameters, by their names, are stepped in backward from now on."""
        ...

    def before_backward(self) -> None:
        """Raise if a backward that is to begin may not step parameters."""
        ...

    def step(self, parameter: torch.Tensor, gradient: torch.Tensor, elements: int | None) -> None:
        """Take the step of one parameter, so many elements at a time; None: all at once."""
        ...


@dataclass(frozen=True)
class ParameterStep:
    """Takes the optimizer's step of one parameter inside a program.

    Parameters
    ----------
    stepper : Stepper
        Knows the optimizer.
    layout : str
        What it is a step of: equal for those that cost the same.
    state_bytes, workspace_bytes : int
        Of the parameter's state, and what the step works with besides.
    moved_bytes : int
        What it reads and writes.
    copies : bool
        Whether others hold the gradient, too: an optimizer may write into its own.
    elements : int or None
        How many are stepped at a time; None: all at once.
    """

    stepper: Stepper
    layout: str
    state_bytes: int
    workspace_bytes: int
    moved_bytes: int
    copies: bool
    elements: int | None = None

    def __repr__(self) -> str:
        return f"step of {self.layout}" + f" by {self.elements}" * (self.elements is not None)

    def __call__(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Take the step, with the gradient laid out as autograd lays out that of a leaf."""
        if self.copies or not _is_laid_out_as(gradient, parameter):
            own = torch.empty_like(parameter) if _is_dense(parameter) else gradient.contiguous()
            gradient = own.copy_(gradient)
        self.stepper.step(parameter, gradient, self.elements)

    def measure(self, *, briefly: bool = False) -> Measurement:
        """Return what it takes, foretold; its time is learned from steps."""
        return Measurement(
            cost_s=self.moved_bytes / _BYTES_PER_S,
            workspace_bytes=self.workspace_bytes,
            output_bytes=(),
            output_strides=(),
            aliases=(),
            none_outputs=(0,),
        )


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

    A parameter's step reads it, its gradient and its state, and writes over it. It stands behind
    all that needs the old weight: what reads it, and what may be computed again and reads
    something that was computed of it. Backward ops that read it are not computed again.
    """
    members = parameters_of(captured.joint, modules)
    names = {
        captured.joint.sources[position].name: members[captured.joint.placeholders[position]]
        for _, position in captured.joint.stepped
    }
    stepper.take(names)
    return _Placing(captured, stepper, members).run()


class _Placing:
    """Adds steps of parameters behind all other ops, and then moves each to its place."""

    def __init__(
        self, captured: Captured, stepper: Stepper, members: Mapping[fx.Node, torch.Tensor]
    ) -> None:
        self.captured = captured
        self.stepper = stepper
        self.members = members
        self.values = list(captured.graph.values)
        self.made: list[tuple[Op, tuple[Call, ...], fx.Node]] = []

    def run(self) -> Captured:
        graph = self._with_pins(self.captured.graph)
        readers_of = readers(graph)
        backward = next(s.id for s in reversed(graph.segments) if s.phase == _BACKWARD)
        bases = [base_of(node) for node, _ in self.captured.joint.stepped]
        for node, position in self.captured.joint.stepped:
            base = base_of(node)
            is_shared = bases.count(base) > 1 or bool(readers_of[self.captured.value_of[base]])
            self._add(len(graph.ops), backward, node, position, copies=is_shared)
        ops = (*graph.ops, *(op for op, _, _ in self.made))
        graph = msgspec.structs.replace(graph, ops=ops, values=tuple(self.values))
        return self._in_place(graph)

    def _with_pins(self, graph: Graph) -> Graph:
        """Have no backward op that reads a parameter which is stepped run once more."""
        stepped = {
            self.captured.value_of[self.captured.joint.placeholders[position]]
            for _, position in self.captured.joint.stepped
        }
        ops: list[Op] = []
        for op in graph.ops:
            read = stepped.intersection(v for way in op.alternatives for v in way.reads)
            if read and op.pinned is None and graph.segments[op.segment].phase == _BACKWARD:
                name = graph.values[min(read)].name
                ops.append(msgspec.structs.replace(op, pinned=f"reads {name}, which is stepped"))
            else:
                ops.append(op)
        return msgspec.structs.replace(graph, ops=tuple(ops))

    def _add(
        self, first: OpId, segment: int, node: fx.Node, position: int, *, copies: bool
    ) -> None:
        joint, value_of = self.captured.joint, self.captured.value_of
        placeholder = joint.placeholders[position]
        parameter = self.members[placeholder]
        own, gradient = value_of[placeholder], value_of[base_of(node)]
        step = self._step_of(parameter, node.meta["val"], copies=copies)
        steps = (step, *self._in_stretches(step, parameter))
        state = self._state(joint.sources[position].name, step.state_bytes)
        reads = (own, gradient, *state)
        op = Op(
            id=first + len(self.made),
            target=f"step.{self.stepper.name}",
            module=joint.sources[position].name.rpartition(".")[0],
            segment=segment,
            alternatives=tuple(
                Alternative(name=f"step.{way}" if way else "default", reads=reads, writes=())
                for way in range(len(steps))
            ),
            pinned="writes over a parameter",
            changes=(own, *state),
        )
        made = fx.Graph().create_node("call_function", step, name="step")
        calls = tuple(Call(one, (placeholder, node), {}, (None,), False) for one in steps)
        self.made.append((op, calls, made))

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

        What it takes lies around the step, whether it is there yet or not.
        """
        if not size_bytes:
            return ()
        self.values.append(
            Value(id=len(self.values), name=f"state of {name}", size_bytes=0, role="state")
        )
        return (len(self.values) - 1,)

    def _in_place(self, graph: Graph) -> Captured:
        """Return the step with each of the ops that were added where it may run first."""
        before, maker = need_before_changes(graph), producers(graph)
        behind: dict[OpId, list[int]] = {}
        for number, (op, _, _) in enumerate(self.made):
            made_by = (maker[v] for v in op.alternatives[0].reads if v in maker)
            last = max((*before[op.id], *made_by), default=len(graph.ops) - len(self.made) - 1)
            behind.setdefault(last, []).append(number)
        ops: list[Op] = []
        calls: list[tuple[Call, ...]] = []
        nodes: list[fx.Node] = []
        moved: dict[OpId, OpId] = {}
        old = zip(graph.ops, self.captured.calls, self.captured.nodes, strict=False)
        for op, own_calls, node in old:
            moved[op.id] = len(ops)
            partner = None if op.partner is None else moved[op.partner]
            ops.append(msgspec.structs.replace(op, id=len(ops), partner=partner))
            calls.append(own_calls)
            nodes.append(node)
            for step, its_calls, its_node in (self.made[n] for n in behind.get(op.id, ())):
                ops.append(msgspec.structs.replace(step, id=len(ops)))
                calls.append(its_calls)
                nodes.append(its_node)
        choices = tuple(
            Choice(branches=tuple(tuple((moved[op], way) for op, way in b) for b in c.branches))
            for c in graph.choices
        )
        graph = msgspec.structs.replace(graph, ops=tuple(ops), choices=choices)
        return dataclasses.replace(
            self.captured,
            graph=validate_graph(graph),
            calls=tuple(calls),
            nodes=tuple(nodes),
            stepper=self.stepper,
        )
