"""Real results of ops of a step, for ops that are measured on them.

A fake kernel may say another type, device or layout than the real kernel gives. Values that belong
together (a maximum and its offset, a seed and where its draws begin) cannot be drawn one by one. So
a backward operator is measured on the results of its own forward, wherever that runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from tightfit.allocator.devices import fixed_generators
from tightfit.allocator.refusals import is_refusal, unless_refused
from tightfit.capture.captured import Call, Captured
from tightfit.capture.nodes import flat_outputs, is_getitem, is_view
from tightfit.capture.opaque.ops import OpaqueForward
from tightfit.costs.measured.call import Footprint, kind_of
from tightfit.graph.ir import OpId
from tightfit.pricing.keys import key_of
from tightfit.pricing.plain import plain_footprint
from tightfit.pricing.synthetic import KnownResults, synthetic_arguments
from tightfit.torch_private import core as private

_FAILS = (RuntimeError, ValueError, IndexError, TypeError)


class MadeByOps(KnownResults):
    """The results of ops of a step that have run."""

    def __init__(self, captured: Captured, device: torch.device) -> None:
        self._captured = captured
        self._device = device
        self._op_of = {node: op for op, node in enumerate(captured.nodes)}
        self._op_of_call = {id(c): op for op, calls in enumerate(captured.calls) for c in calls}
        self._kinds: dict[str, tuple[str | None, ...]] = {}
        self._last: tuple[OpId, tuple[Any, ...] | None] | None = None

    def note(self, key: str, call: Call, record: Footprint) -> None:
        """Note results of a call, if it is the usual way of an op and the trace is wrong."""
        op = self._op_of_call.get(id(call))
        if op is None or call is not self._captured.calls[op][0]:
            return
        fakes = flat_outputs(self._captured.nodes[op])
        kinds = tuple(kind_of(x) if isinstance(x, torch.Tensor) else None for x in fakes)
        if record.output_kinds and any(map(_differs, record.output_kinds, kinds)):
            self._kinds[key] = record.output_kinds

    def kind(self, node: fx.Node) -> str | None:
        maker, place = _maker(node)
        if not self._kinds or maker not in self._op_of:
            return None
        kinds = self._kinds.get(key_of(self._captured.calls[self._op_of[maker]][0]), ())
        return kinds[place] if place < len(kinds) else None

    def given(self, call: Call) -> Mapping[fx.Node, Any]:
        """Return the inputs of a backward op that its forward has made."""
        op = self._op_of_call.get(id(call))
        if op is None or self._phase(op) != "backward":
            return {}
        found: dict[fx.Node, Any] = {}
        for node in dict.fromkeys(call.nodes()):
            maker, place = _maker(node)
            source = self._op_of.get(maker)
            if source is None or not self._is_its_forward(op, source):
                continue
            made = self._made(source)
            if made is not None and place < len(made) and isinstance(made[place], torch.Tensor):
                found[node] = made[place]
        return found

    def _phase(self, op: OpId) -> str:
        graph = self._captured.graph
        return graph.segments[graph.ops[op].segment].phase

    def _is_its_forward(self, op: OpId, source: OpId) -> bool:
        """Whether an op makes several results in the forward, or is the derivative of another."""
        calls, node = self._captured.calls[source], self._captured.nodes[source]
        if self._phase(source) != "forward" or isinstance(calls[0].function, OpaqueForward):
            return False
        is_partner = self._captured.graph.ops[op].partner == source
        return (calls[0].is_tuple or is_partner) and (
            plain_footprint(calls[0], flat_outputs(node)) is None
        )

    def _made(self, op: OpId) -> tuple[Any, ...] | None:
        """Return results of an op; None where it does not run, or has no room. One is kept."""
        if self._last is None or self._last[0] != op:
            self._last = None  # the previous result is freed first
            self._last = op, unless_refused(lambda: self._run(self._captured.calls[op][0]))
        return self._last[1]

    def _run(self, call: Call) -> tuple[Any, ...] | None:
        try:
            args, kwargs = synthetic_arguments(self._captured.joint.module, call, self)
            with torch.no_grad(), fixed_generators(self._device), private.without_autocast():
                made = call.function(*args, **kwargs)
        except _FAILS as error:
            if is_refusal(error):
                raise
            return None
        return tuple(made) if isinstance(made, tuple | list) else (made,)


def _differs(real: str | None, fake: str | None) -> bool:
    return real is not None and fake is not None and real != fake


def _maker(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the op whose result a node is, and which of its results; of a view itself."""
    if is_getitem(node) and not is_view(node):
        maker, place = node.args
        assert isinstance(maker, fx.Node) and isinstance(place, int)
        return maker, place
    return node, 0
