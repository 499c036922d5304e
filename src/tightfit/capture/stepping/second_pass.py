"""The backward a second time, behind itself: for gradients that are not kept.

The norm of all gradients is known when the first pass has ended. A gradient that was freed by then
is computed again for its step, from what the second pass makes or what the first has kept. Its ops
run only if they are read. They are ops of their own, each with its place in the order of the step:
before the steps of the parameters that they read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import msgspec
import torch
from torch import fx

from tightfit.capture.captured import Call, Captured
from tightfit.capture.nodes import base_of, fills_storage, is_getitem, is_random
from tightfit.capture.opaque.tracing import pin_of
from tightfit.capture.stepping.predicted import Copied, TakenOver
from tightfit.graph.ir import Alternative, Graph, Op, Value, ValueId

_BACKWARD = "backward"


class SecondPass:
    """A step with its backward a second time behind it.

    `captured`: the step, whose new ops are optional. `gradients`: what the second pass is for.
    """

    def __init__(self, captured: Captured, gradients: Iterable[fx.Node]) -> None:
        self._first = captured
        self._gradients = {captured.value_of[base_of(node)] for node in gradients}
        self._gone = _overwritten(captured.graph)
        branches = (branch for choice in captured.graph.choices for branch in choice.branches)
        self._linked = {way for branch in branches for way in branch}
        repeated = self._repeated()
        self._nodes = {captured.nodes[op.id] for op in repeated}
        self._values = list(captured.graph.values)
        self._value_of = dict(captured.value_of)
        self._again = {
            value: self._add_value(captured.graph.values[value])
            for op in repeated
            for value in dict.fromkeys(v for way in op.alternatives for v in way.writes)
        }
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self.captured = self._with(repeated)

    def node_of(self, node: fx.Node) -> fx.Node | None:
        copy = self._copy(node)
        return None if copy is node else copy

    # -- which ops ----------------------------------------------------------------------------

    def _repeated(self) -> list[Op]:
        """Return the ops of the backward that gradients are made of and that may run twice."""
        graph = self._first.graph
        needed, wanted = set(self._gradients), list[Op]()
        for op in reversed(graph.ops):
            if graph.segments[op.segment].phase != _BACKWARD:
                break
            if needed.intersection(op.alternatives[0].writes):
                needed.update(op.alternatives[0].reads)
                wanted.append(op)
        repeated, made = list[Op](), set[ValueId]()
        for op in reversed(wanted):
            if self._may_repeat(op) and self._gone.intersection(op.alternatives[0].reads) <= made:
                repeated.append(op)
                made.update(v for way in op.alternatives for v in way.writes)
        return repeated

    def _may_repeat(self, op: Op) -> bool:
        """Whether an op does the same a second time, on other memory."""
        node, default = self._first.nodes[op.id], op.alternatives[0]
        if is_random(node) or pin_of(node) is not None:
            return False
        gives = any(self._first.graph.values[v].role == "gradient" for v in default.writes)
        return op.pinned is None or gives or default.overwrites is not None

    # -- copies -------------------------------------------------------------------------------

    def _with(self, repeated: Sequence[Op]) -> Captured:
        """Return the step with some of its ops once more, behind all others."""
        first = self._first
        ops, calls, nodes = list(first.graph.ops), list(first.calls), list(first.nodes)
        for op in repeated:
            nodes.append(self._copy(first.nodes[op.id]))
            ways = [*self._computing(op), *self._keeping(op)]
            calls.append(tuple(call for _, call in ways))
            ops.append(
                msgspec.structs.replace(
                    op,
                    id=len(ops),
                    alternatives=tuple(way for way, _ in ways),
                    required=False,
                    pinned=None,
                )
            )
        graph = msgspec.structs.replace(first.graph, ops=tuple(ops), values=tuple(self._values))
        return dataclasses.replace(
            first, graph=graph, calls=tuple(calls), nodes=tuple(nodes), value_of=self._value_of
        )

    def _computing(self, op: Op) -> Iterator[tuple[Alternative, Call]]:
        """Yield the ways of an op that read nothing that is left to the first pass alone."""
        for number, (way, call) in enumerate(
            zip(op.alternatives, self._first.calls[op.id], strict=True)
        ):
            stays = self._made_in_backward.intersection(way.reads) - self._again.keys()
            if number and ((op.id, number) in self._linked or way.use != "any" or stays):
                continue
            reads, writes = self._moved(way.reads), self._moved(way.writes)
            over = None if way.overwrites is None else self._moved((way.overwrites,))[0]
            args, kwargs, rests_on = fx.map_arg(
                (call.args, dict(call.kwargs), call.rests_on), self._copy
            )
            outputs = tuple(v if v is None else self._again[v] for v in call.outputs)
            yield (
                msgspec.structs.replace(
                    way, reads=reads, writes=writes, overwrites=over, use="any"
                ),
                dataclasses.replace(
                    call, args=args, kwargs=kwargs, rests_on=rests_on, outputs=outputs
                ),
            )

    def _keeping(self, op: Op) -> Iterator[tuple[Alternative, Call]]:
        """Yield the ways to use the result of the first pass, where it is one tensor."""
        node, (value, *others) = self._first.nodes[op.id], op.alternatives[0].writes
        fake, known = node.meta["val"], self._first.graph.values[value]
        if others or not isinstance(fake, torch.Tensor) or not fills_storage(fake):
            return
        if known.fate != "none" or known.role == "gradient" or value in self._gone:
            return
        again = self._again[value]
        for name, function, over in (
            ("kept.copied", Copied(0, 2 * known.size_bytes), None),
            ("kept", TakenOver(0, 0), value),
        ):
            way = Alternative(name=name, reads=(value,), writes=(again,), overwrites=over)
            yield way, Call(function, (node,), {}, (again,), False)

    @cached_property
    def _made_in_backward(self) -> frozenset[ValueId]:
        graph = self._first.graph
        return frozenset(
            v
            for op in graph.ops
            if graph.segments[op.segment].phase == _BACKWARD
            for way in op.alternatives
            for v in way.writes
        )

    def _moved(self, values: Iterable[ValueId]) -> tuple[ValueId, ...]:
        return tuple(self._again.get(value, value) for value in values)

    def _add_value(self, value: Value) -> ValueId:
        role = "gradient" if value.id in self._gradients else "computed"
        name, number = f"{value.name}, again", len(self._values)
        self._values.append(
            msgspec.structs.replace(value, id=number, name=name, role=role, fate="none")
        )
        return number

    def _copy(self, node: fx.Node) -> fx.Node:
        """Return a node's copy; itself if it is not of the second pass."""
        base = base_of(node)
        maker = base.args[0] if is_getitem(base) else base
        if maker not in self._nodes:
            return node
        if node not in self._copies:
            copy = self._copies[node] = self._graph.node_copy(node, self._copy)
            for read in copy.all_input_nodes:
                if read.graph is not self._graph:  # which lists readers in its own graph only
                    read.users.pop(copy, None)
            if node in self._first.value_of:
                self._value_of[copy] = self._again[self._first.value_of[node]]
        return self._copies[node]


def _overwritten(graph: Graph) -> frozenset[ValueId]:
    """Return the values that the first pass writes over in any case."""
    every = (op.alternatives[0].overwrites for op in graph.ops)
    return frozenset(value for value in every if value is not None)
