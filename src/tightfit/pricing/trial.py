"""Single ops of a step on drawn tensors, of which some fit each other.

An alternative and its default read different tensors, one made from the other: the ops between them
run, on drawn inputs, and both get their results.
"""

from __future__ import annotations

import contextlib
import operator
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from tightfit.capture.captured import Call, Captured, FarFromZero
from tightfit.capture.nodes import is_getitem, is_view
from tightfit.costs.measured.call import Measurement, draw_normal, metered_run
from tightfit.graph.ir import ValueId
from tightfit.pricing.synthetic import synthetic_arguments
from tightfit.torch_private import core as private

Results: TypeAlias = dict[ValueId, torch.Tensor]


class Trial:
    """Tensors for the arguments of some ops of a step.

    `rests_on`: ops that run; the results of others are drawn. `condition`: that of drawn
    parameters. `copies`: whether each call gets copies of its arguments: it may write over them.
    """

    def __init__(
        self,
        captured: Captured,
        defaults: Mapping[fx.Node, Call],
        rests_on: Sequence[fx.Node],
        *,
        condition: FarFromZero | None = None,
        copies: bool = True,
    ) -> None:
        self._module = captured.joint.module
        self._defaults = defaults
        self._traced = captured.joint.module.graph
        self._running = {*rests_on}
        self._condition = condition
        self._copies = copies
        self._values: dict[fx.Node, Any] = {}

    def results(self, call: Call) -> Results:
        """Run a call on its arguments; random numbers are the same each time."""
        with _drawing_the_same():
            made = self._run(call)
        return _by_value(call, made)

    def metered(self, call: Call, device: torch.device) -> tuple[Results, Measurement]:
        """Run a call as `results` does; return the cost of the run, too."""
        with _drawing_the_same():
            args, kwargs = self._arguments(call)
            made, taken = metered_run(call.function, args, kwargs, device=device)
        return _by_value(call, made), taken

    @property
    def is_drawn(self) -> bool:
        """Whether all that calls read is drawn, and nothing is to hold of it."""
        return not self._running and self._condition is None

    def _run(self, call: Call) -> Any:
        args, kwargs = self._arguments(call)
        return call.function(*args, **kwargs)

    def _arguments(self, call: Call) -> Any:
        return fx.map_arg((call.args, call.kwargs), self._argument)

    def _argument(self, node: fx.Node) -> Any:
        return _copy(self._value(node)) if self._copies else self._value(node)

    def _value(self, node: fx.Node) -> Any:
        """Return the value of a node, made after those that it needs: chains of them are long."""
        waiting = [node]
        while waiting:
            last = waiting.pop()
            if last in self._values:
                continue
            missing = [needed for needed in self._needed(last) if needed not in self._values]
            if missing:
                waiting += [last, *reversed(missing)]
            else:
                self._values[last] = self._made(last)
        return self._values[node]

    def _needed(self, node: fx.Node) -> Iterable[fx.Node]:
        """Return the nodes of which the value of a node is made."""
        if is_view(node) or self._is_part(node):
            return node.all_input_nodes
        return self._defaults[node].nodes() if self._runs(node) else ()

    def _made(self, node: fx.Node) -> Any:
        if is_view(node):
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._value)
            function: Any = node.target
            return function(*args, **kwargs)
        if self._is_part(node):
            return self._value(node.args[0])[node.args[1]]  # type: ignore
        return self._run(self._defaults[node]) if self._runs(node) else self._drawn(node)

    def _is_extra(self, node: fx.Node) -> bool:
        """Whether it is an extra op, which only alternatives read."""
        return node.graph is not self._traced

    def _is_part(self, node: fx.Node) -> bool:
        """Whether it is one of several results of a node that runs."""
        return is_getitem(node) and (self._is_extra(node) or node.args[0] in self._running)

    def _runs(self, node: fx.Node) -> bool:
        return node in self._running or (self._is_extra(node) and node in self._defaults)

    def _drawn(self, node: fx.Node) -> Any:
        """Return numbers of both signs, some of them zero; other values as for costs."""
        fake = node.meta.get("val")
        is_float = isinstance(fake, torch.Tensor) and fake.is_floating_point()
        if not is_float or node.op == "get_attr":
            call = Call(operator.pos, (node,), {}, (), False)
            (value,), _ = synthetic_arguments(self._module, call)
            return value
        whole = fake.untyped_storage().nbytes() // fake.itemsize
        flat = torch.empty(whole, dtype=fake.dtype, device=fake.device)
        draw_normal(flat, seed=zlib.crc32(node.name.encode()))
        if self._condition is not None:
            self._condition.enforce(node, flat)
        return flat.as_strided(fake.shape, fake.stride(), 0)


@contextlib.contextmanager
def _drawing_the_same() -> Iterator[None]:
    """Let calls draw the same random numbers each time; other code draws as if nothing had run."""
    with torch.no_grad(), torch.random.fork_rng(), private.without_autocast():
        # `torch.manual_seed` notes a stack trace each time where CUDA was not used yet
        for generator in (torch.default_generator, *torch.cuda.default_generators):
            generator.manual_seed(0)
        yield


def _by_value(call: Call, made: Any) -> Results:
    """Return the tensors that a call has made, by the values they are."""
    outputs = made if call.is_tuple else (made,)
    pairs = zip(call.outputs, outputs, strict=False)
    return {v: t for v, t in pairs if v is not None and isinstance(t, torch.Tensor)}


def _copy(value: Any) -> Any:
    """Copy a tensor with its geometry, so that a call may write over it."""
    if not isinstance(value, torch.Tensor):
        return value
    whole = value.untyped_storage().nbytes() // max(1, value.itemsize)
    flat = value.as_strided((whole,), (1,), 0).clone()
    return flat.as_strided(value.shape, value.stride(), value.storage_offset())
