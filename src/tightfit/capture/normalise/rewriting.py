"""Rewriting a traced step on a copy: its graph and its lists of outputs change together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from tightfit.capture.joint_graph import JointGraph
from tightfit.capture.nodes import base_of, is_getitem, is_view
from tightfit.torch_private import core as private
from tightfit.torch_private import traces
from tightfit.torch_private.wrappers import OutputType

_NUMBER_BYTES = 64  # no more: the least that the CPU's allocator gives out


class Rewriting:
    """A copy of a traced step that the passes rewrite.

    `joint`: the traced step; it stays as it is.
    """

    def __init__(self, joint: JointGraph) -> None:
        self._joint = joint
        self._constants: dict[str, Any] = {}
        self.graph, copies = _copy_of(joint.module.graph)
        self.sources = joint.sources
        self.origins = joint.origins
        self.placeholders = tuple(copies[n] for n in joint.placeholders)
        self.write_backs = [(copies[n], i) for n, i in joint.write_backs]
        self.raw_outputs = [copies[n] if isinstance(n, fx.Node) else n for n in joint.raw_outputs]
        self.gradients = [(copies[n], i) for n, i in joint.gradients]

    @property
    def returned(self) -> list[fx.Node]:
        """The outputs and bases that the step returns, constants left out."""
        return [n for n in self.raw_outputs if isinstance(n, fx.Node)]

    @property
    def outputs(self) -> set[fx.Node]:
        """Everything that the step gives: outputs, new content of buffers, gradients."""
        written = [n for n, _ in self.write_backs] + [n for n, _ in self.gradients]
        return {*self.returned, *written}

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Replace a node everywhere, the lists of outputs included, and erase it."""
        old.replace_all_uses_with(new)
        self.raw_outputs = [new if n is old else n for n in self.raw_outputs]
        self.write_backs = [(new if n is old else n, i) for n, i in self.write_backs]
        self.gradients = [(new if n is old else n, i) for n, i in self.gradients]
        self.graph.erase_node(old)

    def input_viewed(self, index: int) -> int | None:
        """Return the placeholder that a raw output is, or is a view of, by its position."""
        outputs = self._joint.metadata.output_info
        if index >= len(outputs):
            return None
        info = outputs[index]
        is_alias = info.output_type in (OutputType.is_input, OutputType.alias_of_input)
        return info.base_idx if is_alias else None

    def owned(self, node: fx.Node, taken: set[fx.Node]) -> fx.Node:
        """Return the node, or a copy of it if its storage is shared or not the step's own."""
        base = base_of(node)
        own = base.op == "call_function" and base not in taken
        dense = base.meta["val"].numel() == node.meta["val"].numel() if own else False
        return node if own and dense else self.cloned(node)

    def cloned(self, node: fx.Node) -> fx.Node:
        """Return a copy of a node, made right behind it."""
        value = private.like(node.meta["val"])
        return self.insert(node, torch.ops.aten.clone.default, (node,), value)

    def insert(
        self, after: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], value: torch.Tensor
    ) -> fx.Node:
        """Return a new operator behind a node, from whose module it comes too."""
        anchor = after
        while anchor.next.op == "placeholder":
            anchor = anchor.next
        with self.graph.inserting_after(anchor):
            node = self.graph.call_function(target, args)
        node.meta = {"val": value, "seq_nr": after.meta.get("seq_nr")}
        return node

    def constant(self, name: str, tensor: torch.Tensor, value: torch.Tensor) -> fx.Node:
        """Return a new node, made where the graph inserts now, that gives a constant.

        `value`: its fake tensor.
        """
        self._constants[name] = tensor
        node = self.graph.get_attr(name)
        node.meta = {"val": value}
        return node

    def finished(self) -> JointGraph:
        held = {str(n.target) for n in self.graph.nodes if n.op == "get_attr"}
        given = {n: attrgetter(n)(self._joint.module) for n in held - self._constants.keys()}
        constants = {n: outside_allocator(c) for n, c in {**given, **self._constants}.items()}
        return replace(
            self._joint,
            module=traces.lazy_module(constants, self.graph),
            placeholders=self.placeholders,
            write_backs=tuple(self.write_backs),
            raw_outputs=tuple(self.raw_outputs),
            gradients=tuple(self.gradients),
        )


def _copy_of(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result: Any = copy.graph_copy(graph, copies, return_output_node=True)
    value, tail = result
    copy.output(value).meta = dict(tail.meta)
    return copy, copies


def outside_allocator(constant: Any) -> Any:
    """Return a number that a step holds, in memory that PyTorch's allocator has not allocated.

    Plain PyTorch makes such a number again in each forward and holds nothing between steps.
    """
    is_plain = type(constant) is torch.Tensor and constant.device.type == "cpu"
    if not is_plain or constant.requires_grad or constant.layout != torch.strided:
        return constant
    storage = constant.untyped_storage()
    if not 0 < storage.nbytes() <= _NUMBER_BYTES or constant.is_conj() or constant.is_neg():
        return constant
    content = torch.frombuffer(bytearray(storage.tolist()), dtype=torch.uint8)
    return content.view(constant.dtype).as_strided(
        constant.shape, constant.stride(), constant.storage_offset()
    )


def readers_of(base: fx.Node) -> set[fx.Node]:
    """Return the ops that read a storage, directly or through views."""
    found: set[fx.Node] = set()
    waiting = list(base.users)
    while waiting:
        node = waiting.pop()
        if is_view(node):
            waiting.extend(node.users)
        elif node.op == "call_function" and not is_getitem(node):
            found.add(node)
    return found
