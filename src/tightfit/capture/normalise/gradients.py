"""Gradients as autograd would leave them: summed where tied, each with a storage of its own."""

from __future__ import annotations

import torch
from torch import fx

from tightfit.capture.joint_graph import JointGraph
from tightfit.capture.nodes import base_of
from tightfit.capture.normalise.rewriting import (
    insert,
    outputs_of,
    owned,
    position_of,
    readers_of,
)
from tightfit.torch_private import core as private

__all__ = ["own_gradients", "sum_tied_gradients"]

aten = torch.ops.aten


def sum_tied_gradients(joint: JointGraph, tied: list[list[int]]) -> None:
    """Add the gradients of one parameter used under several names inside the step.

    Autograd would keep all of them and add them outside; here the sum is made in place, as soon
    as the next one is there, in the order autograd adds them.
    """
    graph = joint.module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    for positions in tied:
        group = [(n, i) for n, i in joint.gradients if i in positions]
        group.sort(key=lambda item: order[item[0]])
        if len(group) < 2:
            continue
        total = group[0][0]
        others = {base_of(n) for n in outputs_of(joint) if n is not total}
        if len(readers_of(base_of(total))) > 0:
            others.add(base_of(total))
        total = owned(joint, total, others)
        for node, _ in group[1:]:
            anchor = max(total, node, key=lambda n: position_of(graph, n))
            with graph.inserting_after(anchor):
                added = graph.call_function(aten.add_.Tensor, (total, node))
            added.meta = {"val": private.like(total.meta["val"]), "seq_nr": node.meta.get("seq_nr")}
            total = added
        members = {id(n) for n, _ in group}
        joint.gradients[:] = [g for g in joint.gradients if id(g[0]) not in members]
        joint.gradients.append((total, group[0][1]))


def own_gradients(joint: JointGraph) -> None:
    """Make each gradient the only owner of a storage laid out as its parameter.

    Autograd would clone it otherwise, outside the plan.
    """
    placeholders = joint.placeholders
    taken = {base_of(n) for n in joint.raw_outputs if isinstance(n, fx.Node)}
    taken |= {base_of(n) for n, _ in joint.write_backs}
    result = []
    for node, position in joint.gradients:
        parameter = placeholders[position].meta["val"]
        fixed = owned(joint, node, taken)
        if fixed.meta["val"].stride() != parameter.stride() and _is_dense(parameter):
            fixed = insert(
                joint, fixed, _copy_like, (fixed, placeholders[position]), private.like(parameter)
            )
        taken.add(base_of(fixed))
        result.append((fixed, position))
    joint.gradients[:] = result


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda p: p[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _copy_like(source: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a copy of `source` with the strides of `like`."""
    return torch.empty_strided(
        like.shape, like.stride(), dtype=source.dtype, device=source.device
    ).copy_(source)
