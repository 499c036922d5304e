"""Write nodes of a captured graph as Python code, line by line.

Views are made where they are read and dropped with the value they view. Nothing but the names in
the code holds a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tightfit.capture.captured import Call, Captured
from tightfit.capture.nodes import base_of, is_getitem, is_traced_in_backward, is_view
from tightfit.errors import InvalidPlan
from tightfit.graph.ir import ValueId
from tightfit.torch_private import core as private
from tightfit.torch_private.direct import direct

aten = torch.ops.aten


class Function:
    """One function that is being written.

    `lines`: those written so far. `groups`: for each list of gradients handed over so far, the
    placeholders they belong to. `last_reads`: the placeholders that are read, and how many groups
    were handed over before the last time.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.groups: list[tuple[int, ...]] = []
        self.last_reads: dict[int, int] = {}
        self._views: dict[fx.Node, str] = {}
        self._views_on: dict[ValueId, list[fx.Node]] = {}

    def emit(self, line: str) -> None:
        self.lines.append("    " + line)

    def emit_release(self, names: Sequence[str]) -> None:
        self.emit(" = ".join(names) + " = None")

    def emit_hand_over(self, gradients: Sequence[str], names: Sequence[str]) -> None:
        """Yield finished gradients, of which nothing is left."""
        self.emit(f"gradients = [{', '.join(gradients)}]")
        self.emit_release(names)
        self.emit("yield gradients")
        self.emit("gradients = None")

    def placeholder(self, position: int) -> str:
        """Return the name of a placeholder that is read now."""
        self.last_reads[position] = len(self.groups)
        return f"p{position}"

    def view(self, node: fx.Node) -> str | None:
        """Return the name of a view, if it was made and is not forgotten."""
        return self._views.get(node)

    def emit_view(self, node: fx.Node, expression: str, value: ValueId | None) -> str:
        """Make a view, of a value unless it is one of a constant; return its name."""
        name = self._views[node] = f"w{len(self.lines)}"
        self.emit(f"{name} = {expression}")
        if value is not None:
            self._views_on.setdefault(value, []).append(node)
        return name

    def forget_views(self, value: ValueId) -> list[str]:
        """Forget the views of a value; return their names."""
        return [self._views.pop(node) for node in self._views_on.pop(value, ())]


class Writer:
    """Writes a forward function and then a backward function.

    `names`: taken by the code from outside; constants that turn up are added. `forward`,
    `backward`, `function`: both functions, and the function that is being written. `saved`: the
    values that the forward function keeps for the backward function: name, and how kept.
    """

    def __init__(self, captured: Captured, names: Mapping[str, Any]) -> None:
        self.forward, self.backward = Function(), Function()
        self.function = self.forward
        self.saved: dict[str, str] = {}
        self._captured = captured
        self._names = dict(names)
        self._constants: dict[int, str] = {}
        self._positions = {n: i for i, n in enumerate(captured.joint.placeholders)}
        self._made_in: dict[ValueId, Function] = {}  # the living instance of a value
        self._taken_over: set[ValueId] = set()

    @property
    def names(self) -> dict[str, Any]:
        """Names that the code takes from outside so far."""
        return dict(self._names)

    def go_on_in_backward(self) -> None:
        """Begin the backward function; gradients of outputs are there from its start on."""
        self.function = self.backward
        for node, _ in self._captured.joint.tangents:
            self.make(self._captured.value_of[node])

    # -- values -------------------------------------------------------------------------------

    def is_alive(self, value: ValueId) -> bool:
        return value in self._made_in

    def name(self, value: ValueId) -> str:
        """Return the name of a living value that is read now."""
        return self._value(value)

    def make(self, value: ValueId) -> str:
        """Return the name of a value that is computed now."""
        self._made_in[value] = self.function
        return f"v{value}"

    def forget(self, value: ValueId) -> list[str]:
        """Forget the living instance of a value; return the local names that hold it."""
        names = self.function.forget_views(value)
        home = self._made_in.pop(value, None)
        if home is self.function or value in self._taken_over:
            names.append(f"v{value}")
        self._taken_over.discard(value)
        return names

    def release(self, value: ValueId) -> None:
        names = self.forget(value)
        if names:
            self.function.emit_release(names)

    def keep_for_backward(self, name: str, expression: str) -> None:
        """Let the forward function keep something for the backward function, once."""
        self.saved.setdefault(name, expression)

    # -- expressions --------------------------------------------------------------------------

    def call(self, call: Call, wrapped: fx.Node | None = None, around: str = "{}") -> str:
        """Return the code of a call, with something around one of its arguments."""
        literal = self._like_traced if _relies_on_layout(call.function) else self.literal
        arguments = [
            around.format(literal(a)) if wrapped is not None and a is wrapped else literal(a)
            for a in call.args
        ]
        arguments += [f"{k}={literal(v)}" for k, v in call.kwargs.items()]
        return f"{self._constant(direct(call.function))}({', '.join(arguments)})"

    def literal(self, value: Any) -> str:
        """Return the code of an argument or of an output."""
        if isinstance(value, fx.Node):
            return self.reference(value)
        if isinstance(value, list | fx.immutable_collections.immutable_list):
            return "[" + ", ".join(self.literal(v) for v in value) + "]"
        if isinstance(value, tuple):
            return "(" + "".join(self.literal(v) + ", " for v in value) + ")"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        if isinstance(value, float) and math.isfinite(value):
            return repr(value)
        return self._constant(value)

    def _like_traced(self, value: Any) -> str:
        """Return the code of an argument, contiguous in the memory format that the trace has."""
        traced = value.meta.get("val") if isinstance(value, fx.Node) else None
        code = self.literal(value)
        if not isinstance(traced, torch.Tensor):
            return code
        layout = next((f for f in _LAYOUTS if traced.is_contiguous(memory_format=f)), None)
        return f"{code}.contiguous(memory_format={self._constant(layout)})" if layout else code

    def reference(self, node: fx.Node) -> str:
        """Return the name of a node's result; a view is made if it is not there."""
        if node.op == "get_attr":
            return self._constant(getattr(self._captured.joint.module, str(node.target)))
        if is_view(node):
            undone = _undone(node)
            if undone is not None:
                return self.reference(undone)
            self._placeholder(base_of(node))  # which is read, also where the view is there already
            return self.function.view(node) or self._new_view(node)
        return self._placeholder(node) or self._value(self._captured.value_of[node])

    def take(self, **named: Any) -> None:
        """Let the code take things from outside by the names given."""
        self._names.update(named)

    def _constant(self, value: Any) -> str:
        key = id(value)
        if key not in self._constants:
            self._constants[key] = f"c{len(self._constants)}"
            self._names[self._constants[key]] = value
        return self._constants[key]

    def _value(self, value: ValueId) -> str:
        described = self._captured.graph.values[value]
        home = self._made_in.get(value)
        if home is None:
            raise InvalidPlan(
                f"the plan reads value {value} ({described.name}) while it is not alive"
            )
        name = f"v{value}"
        if home is not self.function and value not in self._taken_over:
            keeps = described.fate == "returned"
            self.keep_for_backward(name, f"{name}.detach()" if keeps else name)
            self._taken_over.add(value)
        return name

    def _placeholder(self, node: fx.Node) -> str | None:
        """Return the name of a placeholder that is read now; None for a value."""
        position = self._positions.get(node)
        if position is None or self._captured.joint.sources[position].kind == "tangent":
            return None
        return self.function.placeholder(position)

    def _new_view(self, node: fx.Node) -> str:
        if is_getitem(node):
            expression = f"{self.reference(node.args[0])}[{node.args[1]}]"  # type: ignore
        else:
            # values may have other strides than the trace saw: reshape as eager does
            viewed = node.target in (aten.view.default, aten._unsafe_view.default)
            target = aten.reshape.default if viewed else node.target
            if target is aten.view_as_complex.default and is_traced_in_backward(node):
                target = _view_as_complex_gradient
            expression = self.call(Call(target, node.args, dict(node.kwargs), (), False))  # type: ignore
        return self.function.emit_view(node, expression, self._captured.value_of.get(base_of(node)))


def _undone(node: fx.Node) -> fx.Node | None:
    """Return the tensor that a view restores because it reverses another view."""
    before = node.args[0]
    if node.target not in _TURNS or not isinstance(before, fx.Node) or not is_view(before):
        return None
    turned = before.target is node.target and before.args[1:] == node.args[1:]
    first = before.args[0]
    return first if turned and isinstance(first, fx.Node) else None


def _view_as_complex_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of an input of `torch.view_as_real`, as autograd does."""
    return torch.view_as_complex(gradient.contiguous())


_LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
_TURNS = (aten.t.default, aten.transpose.int)
_OF_CONTIGUOUS = frozenset(
    (
        aten._cdist_backward.default,
        aten._weight_norm_interface_backward.default,
        aten.cudnn_batch_norm_backward.default,
        aten.miopen_batch_norm_backward.default,
        aten.native_group_norm_backward.default,
    )
)
"""Autograd makes the gradient contiguous before it calls these."""


def _relies_on_layout(function: Any) -> bool:
    """Whether an operator may read memory of tensors as if they were contiguous.

    Code around it has made them so. A trace holds no copy where its own tensors are contiguous, and
    gradients of a step may have other strides. Operators of other libraries are taken to do so.
    """
    if function in _OF_CONTIGUOUS:
        return True
    is_other = isinstance(function, private.OpOverload) and function.namespace not in _OWN
    return is_other and not function._schema.is_mutable


_OWN = ("aten", "prims", "tightfit")
"""Libraries whose operators take tensors with any strides."""
