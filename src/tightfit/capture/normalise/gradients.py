"""Gradients as autograd would leave them: summed in place, each with a storage of its own."""

from __future__ import annotations

import torch
from torch import fx

from tightfit.capture.nodes import base_of, is_getitem, is_without_gaps
from tightfit.capture.normalise.rewriting import Rewriting, readers_of
from tightfit.capture.opaque.tracing import is_opaque_backward, with_sums
from tightfit.torch_private import core as private

aten = torch.ops.aten


def sum_in_place(work: Rewriting) -> None:
    """Add up the gradients of a weight with several readers in place, where autograd does.

    Their order is that of the trace, which is autograd's.
    """
    bases = [base_of(n) for n in work.outputs]
    waiting = [n for n, _ in work.gradients]
    while waiting:
        node = waiting.pop()
        if node.target is not aten.add.Tensor or node.kwargs:
            continue
        total, other = node.args
        if not (isinstance(total, fx.Node) and isinstance(other, fx.Node)):
            continue
        waiting += [total, other]
        base, given = base_of(total), (total.meta["val"], other.meta["val"])
        is_own = base.op == "call_function" and base not in bases and readers_of(base) == {node}
        is_whole = base.meta["val"].numel() == given[0].numel() and is_without_gaps(given[0])
        if is_own and is_whole and all(t.shape == node.meta["val"].shape for t in given):
            node.target = aten.add_.Tensor
            node.meta["val"] = private.like(given[0])


def add_inside_opaque(work: Rewriting) -> None:
    """Let the backward of an opaque module add its gradients to earlier ones, as eager does.

    A tensor with several readers inside and others outside: autograd adds up one after the other.
    """
    for node in [n for n in work.graph.nodes if is_opaque_backward(n)]:
        before: dict[int, fx.Node] = {}
        for pick in [user for user in node.users if is_getitem(user)]:
            total = next(iter(pick.users), None)
            if total is None or len(pick.users) > 1 or not _adds(total, pick):
                continue
            before[pick.args[1]] = total.args[0]  # type: ignore[index, assignment]
            pick.meta["val"] = total.meta["val"]
            work.replace(total, pick)
        if before:
            with_sums(node, before)
            made = list(node.meta["val"])
            for place in before:
                made[place] = next(u for u in node.users if u.args[1] == place).meta["val"]
            node.meta["val"] = type(node.meta["val"])(made)


def _adds(total: fx.Node, pick: fx.Node) -> bool:
    """Whether a node adds a picked result to a gradient that existed before."""
    if total.target is not aten.add.Tensor or total.kwargs or total.args[1] is not pick:
        return False
    other = total.args[0]
    backward = pick.args[0]
    is_earlier = isinstance(other, fx.Node) and other < backward  # type: ignore[operator]
    return is_earlier and total.meta["val"].shape == pick.meta["val"].shape


def own_gradients(work: Rewriting) -> None:
    """Make each gradient the only owner of a storage laid out as its parameter.

    If not, autograd would clone it outside the plan.
    """
    placeholders = work.placeholders
    taken = {base_of(n) for n in work.returned}
    taken |= {base_of(n) for n, _ in work.write_backs}
    result = []
    for node, position in work.gradients:
        parameter = placeholders[position].meta["val"]
        fixed = work.owned(node, taken)
        if fixed.meta["val"].stride() != parameter.stride() and is_without_gaps(parameter):
            fixed = work.insert(
                fixed, _copy_like, (fixed, placeholders[position]), private.like(parameter)
            )
        taken.add(base_of(fixed))
        result.append((fixed, position))
    work.set_gradients(result)


def added_up(gradient: fx.Node) -> fx.Node:
    """Return the node that autograd has added up for a gradient: before its layout is changed."""
    source = gradient.args[0] if gradient.target is _copy_like else gradient
    assert isinstance(source, fx.Node)
    return source


def _copy_like(source: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a copy of `source` with the strides of `like`."""
    return torch.empty_strided(
        like.shape, like.stride(), dtype=source.dtype, device=source.device
    ).copy_(source)
