"""The same call on fewer rows of its batch, where there is no room to run it whole."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tightfit.capture.captured import Call, Captured, FarFromZero
from tightfit.capture.nodes import base_of, flat_outputs, is_getitem
from tightfit.torch_private import core as private

_SMALL = 1 / 64  # of the largest tensor: smaller tensors have no rows of the batch
_LEAST_SHAPE = 3  # numbers that are a shape in any case; fewer may be strides of a kernel


def rows_of(nodes: Iterable[fx.Node]) -> int:
    """Return how many rows the largest of some tensors has; 0 if there is none."""
    largest = max(_tensors_of(nodes), key=lambda tensor: tensor.nbytes, default=None)
    return largest.shape[0] if largest is not None and largest.dim() else 0


def _tensors_of(nodes: Iterable[fx.Node]) -> list[torch.Tensor]:
    return [x for node in nodes for x in flat_outputs(node) if isinstance(x, torch.Tensor)]


def _is_a_shape_only(node: fx.Node) -> bool:
    """Whether a constant is one element, expanded: only its shape is read."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() > 0 and not any(value.stride())


class FewerRows:
    """Calls of a step whose large tensors have fewer rows; parameters and buffers are whole.

    `nodes`: arguments: the largest of them says how many rows there are. `with_small`: whether
    small tensors with as many rows have fewer too: classes of a loss, say. `defaults`: how ops are
    run of which results are among the arguments. `running`: those of these ops that run; the
    results of others are drawn.
    """

    def __init__(
        self,
        captured: Captured,
        nodes: Sequence[fx.Node],
        rows: int,
        *,
        with_small: bool = False,
        defaults: Mapping[fx.Node, Call] | None = None,
        running: Sequence[fx.Node] = (),
    ) -> None:
        self._captured = captured
        self._before, self._rows = rows_of(nodes), rows
        tensors = _tensors_of(nodes)
        self._shapes = {tuple(x.shape) for x in tensors}
        largest_bytes = max((x.nbytes for x in tensors), default=0)
        self._least_bytes = 0 if with_small else _SMALL * largest_bytes
        self._given = defaults or {}
        self._runs = {*running}
        self._graph = fx.Graph()
        self._made: dict[fx.Node, fx.Node] = {}
        self.defaults: dict[fx.Node, Call] = {}
        """How substitutes of the ops in `running` are run, and ops of ours."""

    def call(self, call: Call) -> Call:
        return dataclasses.replace(
            call,
            args=self._argument(call.args),
            kwargs=self._argument(call.kwargs),
            rests_on=tuple(map(self.node, call.rests_on)),
            condition=self._condition(call.condition),
        )

    def _condition(self, given: FarFromZero | None) -> FarFromZero | None:
        if given is None:
            return None
        return FarFromZero(self.node(given.weight), given.bias and self.node(given.bias))

    def _argument(self, given: Any) -> Any:
        """Return the substitute for an argument; a shape that begins with the rows has fewer."""
        if isinstance(given, fx.Node):
            return self.node(given)
        if isinstance(given, Mapping):
            return {name: self._argument(own) for name, own in given.items()}
        if not isinstance(given, tuple | list):
            return given
        if self._is_shape(given) and given[0] == self._before:
            return type(given)((self._rows, *given[1:]))
        return type(given)(self._argument(own) for own in given)

    def _is_shape(self, given: Sequence[Any]) -> bool:
        """Whether an argument is a shape; few numbers are if one of the tensors has that shape."""
        if not given or not all(type(size) is int for size in given):
            return False
        return len(given) >= _LEAST_SHAPE or tuple(given) in self._shapes

    def node(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr" and not _is_a_shape_only(node):
            return node
        if node not in self._made:
            self._made[node] = self._new(node)
        return self._made[node]

    def _new(self, node: fx.Node) -> fx.Node:
        if is_getitem(node) and self._is_run(node.args[0]):  # type: ignore
            of, place = node.args
            new = self._graph.call_function(operator.getitem, (self.node(of), place))  # type: ignore
        else:
            new = self._graph.placeholder(node.name)
        whole = node.meta.get("val")
        new.meta["val"] = private.pytree.tree_map_only(
            torch.Tensor, lambda fake: self._shorter(node, fake), whole
        )
        if self._is_run(node):
            self.defaults[new] = self.call(self._given[node])
        return new

    def _is_run(self, node: fx.Node) -> bool:
        ours = node.graph is not self._captured.joint.module.graph
        return node in self._runs or (ours and node in self._given)

    def _shorter(self, node: fx.Node, fake: torch.Tensor) -> torch.Tensor:
        has_rows = fake.dim() and fake.shape[0] == self._before
        if not has_rows or fake.nbytes < self._least_bytes or self._lasts(node):
            return fake
        with private.fake_mode_of(fake):
            return torch.empty_strided(
                (self._rows, *fake.shape[1:]), fake.stride(), dtype=fake.dtype, device=fake.device
            )

    def _lasts(self, node: fx.Node) -> bool:
        """Whether a tensor is a parameter, a buffer, or made of one alone: a view, a cast."""
        while node.op == "call_function" and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        value = self._captured.value_of.get(base_of(node))
        role = None if value is None else self._captured.graph.values[value].role
        return role in ("parameter", "buffer")


def shortened(
    captured: Captured, nodes: Sequence[fx.Node], rows: int, **given: Any
) -> Iterator[FewerRows]:
    """Yield the ways to give calls fewer rows: small tensors whole, then shortened as well."""
    for with_small in (False, True):
        yield FewerRows(captured, nodes, rows, with_small=with_small, **given)
