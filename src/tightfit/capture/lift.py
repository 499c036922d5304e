"""From a normalised joint graph to the graph of values and ops that planners see.

One storage is one value; one operator execution is one op; views are no ops and are made again
wherever they are read. Further facts for the planner are fates and pins: values that the caller
keeps or that are copied back into buffers, ops that may not run twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tightfit.capture.captured import Call, Captured
from tightfit.capture.flops import flops_of
from tightfit.capture.joint_graph import JointGraph
from tightfit.capture.nodes import (
    base_of,
    flat_outputs,
    forward_nodes,
    is_getitem,
    is_op,
    is_random,
    storage_bytes,
    writes_in_place,
)
from tightfit.capture.opaque.tracing import is_record, opaque_function, pin_of
from tightfit.graph.ir import Alternative, Device, Fate, Graph, Op, Role, Segment, Value, ValueId
from tightfit.graph.validate import validate_graph
from tightfit.torch_private import core as private

FORWARD, BACKWARD = 0, 1

_DECIDING = (
    torch.ops.aten.topk,
    torch.ops.aten.sort,
    torch.ops.aten.argsort,
    torch.ops.aten.argmax,
    torch.ops.aten.argmin,
    torch.ops.aten.nonzero,
)
"""Operators that choose places by values. Computed again from values that round differently, a near
tie would go the other way. A router would send a token elsewhere than its gradient says."""


def lift(joint: JointGraph, device: Device, name: str, tied: Sequence[Sequence[int]]) -> Captured:
    """Return the planner's graph of a normalised joint graph.

    `device`: sizes are rounded up to its granularity. `tied`: placeholder positions that share a
    storage; they become one value.
    """
    return _Lifter(joint, device, tied).run(name)


class _Lifter:
    def __init__(self, joint: JointGraph, device: Device, tied: Sequence[Sequence[int]]) -> None:
        self.joint = joint
        self.device = device
        self.tied = {i: group[0] for group in tied for i in group}
        self.values: list[Value] = []
        self.value_of: dict[fx.Node, ValueId] = {}
        self.ops: list[Op] = []
        self.calls: list[tuple[Call, ...]] = []
        self.nodes: list[fx.Node] = []
        self.constants: dict[str, int] = {"parameters": 0, "buffers": 0, "inputs": 0}
        self.op_at: dict[int, int] = {}
        self.gradient_bases = {base_of(n) for n, _ in joint.gradients}
        self.stepped_bases = {base_of(n) for n, _ in joint.stepped}
        self.returned_nodes = [n for n in joint.raw_outputs if isinstance(n, fx.Node)]
        self.returned = {base_of(n) for n in self.returned_nodes}
        self.written = {base_of(n): i for n, i in joint.write_backs}
        self.replaced: set[ValueId] = set()

    def run(self, name: str) -> Captured:
        self._add_constants()
        self.replaced = {self.value_of[self.joint.placeholders[i]] for i in self.written.values()}
        written = [node for node, _ in self.joint.write_backs]
        forward = forward_nodes(self.joint.module.graph, [*self.returned_nodes, *written])
        ordered = [n for n in self.joint.module.graph.nodes if is_op(n)]
        for node in [n for n in ordered if n in forward]:
            self._add_op(node, FORWARD)
        for node in [n for n in ordered if n not in forward]:
            self._add_op(node, BACKWARD)
        graph = Graph(
            name=name,
            device=self.device,
            values=tuple(self.values),
            ops=tuple(self.ops),
            segments=(Segment(id=FORWARD, phase="forward"), Segment(id=BACKWARD, phase="backward")),
            constants_bytes=self.constants,
        )
        return Captured(
            graph=validate_graph(graph),
            joint=self.joint,
            calls=tuple(self.calls),
            nodes=tuple(self.nodes),
            value_of=self.value_of,
        )

    def _add_value(self, node_name: str, size: int, role: Role, fate: Fate, **rest: Any) -> int:
        number = len(self.values)
        self.values.append(
            Value(
                id=number,
                name=node_name,
                size_bytes=self.device.rounded(size),
                role=role,
                fate=fate,
                **rest,
            )
        )
        return number

    def _add_constants(self) -> None:
        placeholders = self.joint.placeholders
        roles: dict[str, Any] = {"parameter": "parameter", "buffer": "buffer"}  # or an input
        for position, (node, source) in enumerate(
            zip(placeholders, self.joint.sources, strict=True)
        ):
            first = self.tied.get(position, position)
            if first != position:
                self.value_of[node] = self.value_of[placeholders[first]]
                continue
            if not (node.users or isinstance(node.meta.get("val"), torch.Tensor)):
                continue  # a number that is not read
            size = storage_bytes(node.meta.get("val"))
            if source.kind == "tangent":
                number = self._add_value(source.name, size, "tangent", "none", segment=BACKWARD)
            else:
                role = roles.get(source.kind, "input")
                number = self._add_value(source.name, size, role, "none")
                self.constants[f"{role}s"] += self.device.rounded(size)
            self.value_of[node] = number

    def _add_op(self, node: fx.Node, segment: int) -> None:
        number = len(self.ops)
        sequence = node.meta.get("seq_nr")
        partner = self.op_at.get(sequence) if segment == BACKWARD and sequence else None
        if segment == FORWARD and sequence is not None:
            self.op_at[sequence] = number
        outputs = self._add_outputs(node)
        writes = tuple(v for v in outputs if v is not None)
        overwritten = base_of(node.all_input_nodes[0]) if writes_in_place(node) else None
        function, args = opaque_function(node) or (node.target, node.args)
        call = Call(function, args, dict(node.kwargs), outputs, _is_tuple(node))  # type: ignore
        reads = dict.fromkeys(
            self.value_of[base_of(n)] for n in call.nodes() if base_of(n) in self.value_of
        )
        alternative = Alternative(
            reads=tuple(reads),
            writes=writes,
            overwrites=self.value_of[overwritten] if overwritten is not None else None,
        )
        self.ops.append(
            Op(
                id=number,
                target=_target_name(node),
                module=self.joint.origins.module_at(sequence),
                segment=segment,
                partner=partner,
                alternatives=(alternative,),
                pinned=self._pin(node, alternative),
                random_state_bytes=random_state_bytes(node) if is_random(node) else 0,
                flops=flops_of(node),
            )
        )
        self.calls.append((call,))
        self.nodes.append(node)

    def _add_outputs(self, node: fx.Node) -> tuple[ValueId | None, ...]:
        pick = {u.args[1]: u for u in node.users if is_getitem(u)} if _is_tuple(node) else {}
        outputs: list[ValueId | None] = []
        for index, tensor in enumerate(flat_outputs(node)):
            base = pick.get(index, node if not _is_tuple(node) else None)
            if tensor is None:
                outputs.append(None)
                continue
            suffix = f".{index}" if _is_tuple(node) else ""
            size = storage_bytes(tensor)
            stays = is_record(node, index) or self._is_elsewhere(tensor)
            number = self._add_value(node.name + suffix, size, *self._fate(base), stays=stays)
            if base is not None and base in self.written:
                self._mark_write_back(number, self.written[base])
            for user in node.users:
                if is_getitem(user) and _is_tuple(node) and user.args[1] == index:
                    self.value_of[user] = number
            if not _is_tuple(node):
                self.value_of[node] = number
            outputs.append(number)
        return tuple(outputs)

    def _is_elsewhere(self, tensor: Any) -> bool:
        """Whether it is a tensor on the CPU amid a step on a GPU."""
        is_tensor = isinstance(tensor, torch.Tensor)
        return is_tensor and self.device.kind == "cuda" and tensor.device.type != "cuda"

    def _fate(self, base: fx.Node | None) -> tuple[Role, Fate]:
        if base in self.gradient_bases:
            return "gradient", "handed_over"
        if base in self.stepped_bases:
            return "gradient", "none"
        if base in self.returned:
            return "computed", "returned"
        return "computed", "none"

    def _mark_write_back(self, number: int, position: int) -> None:
        target = self.value_of[self.joint.placeholders[position]]
        old = self.values[number]
        self.values[number] = Value(
            id=old.id,
            name=old.name,
            size_bytes=old.size_bytes,
            fate="written_back",
            replaces=target,
        )

    def _pin(self, node: fx.Node, alternative: Alternative) -> str | None:
        if any(self.values[v].fate == "handed_over" for v in alternative.writes):
            return "makes a gradient that is handed over"
        if any(self.values[v].role == "gradient" for v in alternative.writes):
            return "makes a gradient that the optimizer takes"
        for value in alternative.reads:
            if value in self.replaced:
                return f"reads {self.values[value].name}, which the step updates"
            if self.values[value].fate == "written_back":
                return f"reads {self.values[value].name}, which is gone once it is written back"
        if (reason := pin_of(node)) is not None:
            return reason
        if alternative.overwrites is not None:
            return "writes over one of its arguments"
        if getattr(node.target, "overloadpacket", None) in _DECIDING:
            return "decides which elements others take: kept, so that all take the same"
        return None


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def _target_name(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, private.OpOverload):
        return target.name().replace("::", ".")
    return getattr(target, "__name__", str(target)).lstrip("_")


def random_state_bytes(node: fx.Node) -> int:
    """Return the bytes of the generator state kept to draw the same numbers again."""
    device = next(
        (t.device for t in flat_outputs(node) if isinstance(t, torch.Tensor)), torch.device("cpu")
    )
    return torch.get_rng_state().nbytes if device.type == "cpu" else 0
