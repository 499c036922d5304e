"""Rewriting a traced step: its module and its lists of outputs change together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from tightfit.capture.joint_graph import JointGraph
from tightfit.capture.nodes import base_of, is_getitem, is_view
from tightfit.torch_private import core as private

__all__ = [
    "ancestors_of",
    "insert",
    "outputs_of",
    "owned",
    "position_of",
    "readers_of",
    "replace",
]


def outputs_of(joint: JointGraph) -> set[fx.Node]:
    nodes = [n for n in joint.raw_outputs if isinstance(n, fx.Node)]
    nodes += [n for n, _ in joint.write_backs] + [n for n, _ in joint.gradients]
    return set(nodes)


def replace(joint: JointGraph, old: fx.Node, new: fx.Node) -> None:
    """Replace a node everywhere, the lists of outputs included."""
    old.replace_all_uses_with(new)
    joint.raw_outputs[:] = [new if n is old else n for n in joint.raw_outputs]
    joint.write_backs[:] = [(new if n is old else n, i) for n, i in joint.write_backs]
    joint.gradients[:] = [(new if n is old else n, i) for n, i in joint.gradients]


def position_of(graph: fx.Graph, node: fx.Node) -> int:
    return next(i for i, n in enumerate(graph.nodes) if n is node)


def owned(joint: JointGraph, node: fx.Node, taken: set[fx.Node]) -> fx.Node:
    """Return the node, or a copy of it if its storage is shared or not the step's own."""
    base = base_of(node)
    own = base.op == "call_function" and base not in taken
    dense = base.meta["val"].numel() == node.meta["val"].numel() if own else False
    if own and dense:
        return node
    return insert(
        joint, node, torch.ops.aten.clone.default, (node,), private.like(node.meta["val"])
    )


def insert(
    joint: JointGraph, after: fx.Node, target: Callable, args: tuple, value: torch.Tensor
) -> fx.Node:
    graph = joint.module.graph
    anchor = after
    while anchor.next.op == "placeholder":
        anchor = anchor.next
    with graph.inserting_after(anchor):
        node = graph.call_function(target, args)
    node.meta = {"val": value, "seq_nr": after.meta.get("seq_nr")}
    return node


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


def ancestors_of(roots: list[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found
