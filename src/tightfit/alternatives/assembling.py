"""Puts the alternatives that contributors offer into a captured step.

Nodes become values, extra ops find their place behind their inputs, and as ids are positions,
the ops behind them get other numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
from torch import fx

from tightfit.alternatives.base import Extension, Extra, Implementation
from tightfit.capture.captured import Call, Captured
from tightfit.capture.nodes import base_of, storage_bytes
from tightfit.graph.ir import Alternative, Choice, Exactness, Op, OpId, Value, ValueId
from tightfit.graph.liveness import producers
from tightfit.graph.validate import validate_graph

_Added = tuple[Op, tuple[Call, ...], fx.Node]
"""An op, the calls of its alternatives, and its node."""


class Assembly:
    """A captured step that gets more and more alternatives."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._ops = list(captured.graph.ops)
        self._calls = list(captured.calls)
        self._values = list(captured.graph.values)
        # No value that is added is written back, or replaces another
        self._replaced = {v.replaces for v in self._values if v.fate == "written_back"}
        self._value_of = dict(captured.value_of)
        self._number = {node: op for op, node in enumerate(captured.nodes)}
        self._maker = producers(captured.graph)
        self._behind: dict[OpId, list[_Added]] = {}
        self._ahead: dict[OpId, list[_Added]] = {}
        self._linked: list[list[tuple[OpId, int]]] = []

    def add(
        self, op: Op, extension: Extension, allowed: Sequence[Exactness]
    ) -> tuple[Implementation, ...]:
        """Add those implementations that are exact enough; return them."""
        linked = [offer for _, offer in extension.together]
        if any(offer.exactness not in allowed for offer in linked):
            return ()
        compiles = all(extra.compiles for extra in extension.extras)
        offers = tuple(
            dataclasses.replace(offer, compiles=offer.compiles and compiles)
            for offer in extension.implementations
            if offer.exactness in allowed and self._may_run(op, offer)
        )
        elsewhere = [pair for pair in extension.elsewhere if pair[1].exactness in allowed]
        if not (offers or elsewhere):
            return ()
        offered = (*offers, *linked, *(offer for _, offer in elsewhere))
        least = max((offer.exactness for offer in offered), key=allowed.index)
        for extra in extension.extras:
            if extra.node not in self._value_of:
                self._add_extra(extra, least)
        for node, offer in elsewhere:
            both = dataclasses.replace(offer, compiles=offer.compiles and compiles)
            self._append(self._number[node], (both,))
        first = self._append(op.id, offers)
        if extension.together:
            pairs = [(op.id, first)]
            for node, offer in extension.together:
                other = self._number[node]
                pairs.append((other, self._append(other, (offer,))))
            self._linked.append(pairs)
        self._change_default(op.id, extension)
        for node in extension.optional:
            number = self._number[node]
            self._ops[number] = msgspec.structs.replace(self._ops[number], required=False)
        return offers

    def _append(self, op: OpId, offers: Sequence[Implementation]) -> int:
        """Append implementations to an op; return the position of the first."""
        position = len(self._calls[op])
        calls = [self._call(op, offer) for offer in offers]
        alternatives = [self._alternative(w, c) for w, c in zip(offers, calls, strict=True)]
        old = self._ops[op]
        self._ops[op] = msgspec.structs.replace(
            old, alternatives=(*old.alternatives, *alternatives)
        )
        self._calls[op] = (*self._calls[op], *calls)
        return position

    def _change_default(self, op: OpId, extension: Extension) -> None:
        old = self._ops[op]
        default, *others = old.alternatives
        if extension.default_use == "first":
            default = msgspec.structs.replace(default, use="first")
        pinned = None if extension.unpins else old.pinned
        alternatives = default, *others
        self._ops[op] = msgspec.structs.replace(old, alternatives=alternatives, pinned=pinned)

    def finished(self) -> Captured:
        ordered: list[_Added] = []
        moved: dict[OpId, OpId] = {}
        for op, calls, node in zip(self._ops, self._calls, self._captured.nodes, strict=True):
            ordered += self._ahead.get(op.id, ())
            moved[op.id] = len(ordered)
            partner = None if op.partner is None else moved[op.partner]
            ordered.append((msgspec.structs.replace(op, partner=partner), calls, node))
            ordered += self._behind.get(op.id, ())
        ops = (msgspec.structs.replace(op, id=i) for i, (op, _, _) in enumerate(ordered))
        choices = (
            Choice(
                branches=(
                    tuple((moved[op], 0) for op, _ in pairs),
                    tuple((moved[op], offer) for op, offer in pairs),
                )
            )
            for pairs in self._linked
        )
        graph = msgspec.structs.replace(
            self._captured.graph, ops=tuple(ops), values=tuple(self._values), choices=tuple(choices)
        )
        return dataclasses.replace(
            self._captured,
            graph=validate_graph(graph),
            calls=tuple(calls for _, calls, _ in ordered),
            nodes=tuple(node for _, _, node in ordered),
            value_of=self._value_of,
            plain=self._captured,
        )

    def _add_extra(self, extra: Extra, exactness: Exactness) -> None:
        """Make an optional op of an extra, behind the last op that it reads, or ahead of one."""
        reads = self._reads(extra.args)
        last = max((self._maker[v] for v in reads if v in self._maker), default=0)
        neighbour = self._ops[last if extra.before is None else self._number[extra.before]]
        name = f"{neighbour.module or neighbour.target}: {extra.name}"
        writes = tuple(
            self._add_value(node, name, neighbour.id) for node in extra.results or (extra.node,)
        )
        self._value_of.setdefault(extra.node, writes[0])
        op = Op(
            id=neighbour.id,
            target=extra.name,
            module=neighbour.module,
            segment=neighbour.segment,
            alternatives=(
                Alternative(reads=reads, writes=writes),
                *(
                    Alternative(
                        name=f"{extra.name}.{number}",
                        reads=reads,
                        writes=writes,
                        exactness=exactness,
                    )
                    for number in range(1, 1 + len(extra.others))
                ),
            ),
            required=False,
            pinned=self._pin(reads),
            flops=extra.flops,
        )
        several = bool(extra.results)
        calls = tuple(
            Call(extra.function, args, {}, writes, several, compiles=extra.compiles)
            for args in (extra.args, *extra.others)
        )
        place = self._behind if extra.before is None else self._ahead
        place.setdefault(neighbour.id, []).append((op, calls, extra.node))

    def _add_value(self, node: fx.Node, name: str, maker: OpId) -> ValueId:
        size = self._captured.graph.device.rounded(storage_bytes(node.meta["val"]))
        value = Value(id=len(self._values), name=name, size_bytes=size)
        self._values.append(value)
        self._value_of[node] = value.id
        self._maker[value.id] = maker
        return value.id

    def _pin(self, reads: tuple[ValueId, ...]) -> str | None:
        """Return why an op that reads some values may not be computed again; None: it may."""
        for value in (self._values[v] for v in reads):
            if value.id in self._replaced:
                return f"reads {value.name}, which the step updates"
            if value.fate == "written_back":
                return f"reads {value.name}, which is gone once it is written back"
        return None

    def _may_run(self, op: Op, offer: Implementation) -> bool:
        """Whether one reads nothing that is gone by the time it may run."""
        return op.pinned is not None or self._pin(self._reads((offer.args, offer.kwargs))) is None

    def _call(self, op: OpId, offer: Implementation) -> Call:
        default = self._calls[op][0]
        outputs, is_tuple = default.outputs, default.is_tuple
        if isinstance(offer.outputs, int):
            outputs, is_tuple = (outputs[offer.outputs],), False
        elif offer.outputs is not None:
            outputs, is_tuple = tuple(outputs[i] for i in offer.outputs), True
        return Call(offer.function, offer.args, offer.kwargs, outputs, is_tuple, **offer.traits)

    def _alternative(self, offer: Implementation, call: Call) -> Alternative:
        overwritten = None
        if offer.overwrites is not None:
            overwritten = self._value_of[base_of(offer.overwrites)]
        return Alternative(
            name=offer.name,
            reads=self._reads((offer.args, offer.kwargs)),
            writes=tuple(v for v in call.outputs if v is not None),
            overwrites=overwritten,
            use=offer.use,
            exactness=offer.exactness,
            flops=offer.flops,
        )

    def _reads(self, arguments: Any) -> tuple[ValueId, ...]:
        """Return the values that the nodes among some arguments belong to."""
        found: list[fx.Node] = []
        fx.map_arg(arguments, found.append)
        known = self._value_of
        return tuple(dict.fromkeys(known[base_of(n)] for n in found if base_of(n) in known))
