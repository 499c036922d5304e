"""Gradients as autograd would leave them: summed where tied, each with a storage of its own."""

from __future__ import annotations

import torch

from tightfit.capture.nodes import base_of
from tightfit.capture.normalise.rewriting import Rewriting, readers_of
from tightfit.torch_private import core as private

__all__ = ["own_gradients", "sum_tied_gradients"]

aten = torch.ops.aten


def sum_tied_gradients(work: Rewriting) -> None:
    """Add the gradients of one parameter used under several names inside the step.

    Autograd would keep all of them and add them outside; here the sum is made in place, as soon
    as the next one is there, in the order autograd adds them.
    """
    graph = work.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    for positions in work.tied:
        group = [(n, i) for n, i in work.gradients if i in positions]
        group.sort(key=lambda item: order[item[0]])
        if len(group) < 2:
            continue
        total = group[0][0]
        others = {base_of(n) for n in work.outputs if n is not total}
        if len(readers_of(base_of(total))) > 0:
            others.add(base_of(total))
        total = work.owned(total, others)
        for node, _ in group[1:]:
            anchor = max(total, node, key=work.position_of)
            with graph.inserting_after(anchor):
                added = graph.call_function(aten.add_.Tensor, (total, node))
            added.meta = {"val": private.like(total.meta["val"]), "seq_nr": node.meta.get("seq_nr")}
            total = added
        members = {id(n) for n, _ in group}
        rest = [g for g in work.gradients if id(g[0]) not in members]
        work.set_gradients([*rest, (total, group[0][1])])


def own_gradients(work: Rewriting) -> None:
    """Make each gradient the only owner of a storage laid out as its parameter.

    Autograd would clone it otherwise, outside the plan.
    """
    placeholders = work.placeholders
    taken = {base_of(n) for n in work.returned}
    taken |= {base_of(n) for n, _ in work.write_backs}
    result = []
    for node, position in work.gradients:
        parameter = placeholders[position].meta["val"]
        fixed = work.owned(node, taken)
        if fixed.meta["val"].stride() != parameter.stride() and _is_dense(parameter):
            fixed = work.insert(
                fixed, _copy_like, (fixed, placeholders[position]), private.like(parameter)
            )
        taken.add(base_of(fixed))
        result.append((fixed, position))
    work.set_gradients(result)


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
