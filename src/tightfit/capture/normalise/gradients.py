"""Gradients as autograd would leave them: summed in place, each with a storage of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from tightfit.capture.nodes import base_of, is_getitem, is_without_gaps
from tightfit.capture.normalise.rewriting import Rewriting, readers_of
from tightfit.capture.opaque.tracing import is_opaque_backward, with_sums
from tightfit.torch_private import core as private

aten = torch.ops.aten


def sum_in_place(work: Rewriting) -> None:
    """Add up the gradients of a weight with several readers in place, where autograd does.

    The trace has them in autograd's order.
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

    If not, autograd would clone it outside the plan. The gradient of an input that autograd has
    made keeps its strides: bits of values computed from it depend on them. It may be a view of a
    storage that holds others, too.
    """
    taken = {base_of(n) for n in work.returned}
    taken |= {base_of(n) for n, _ in work.write_backs}
    fixed: dict[int, fx.Node] = {}
    goes_on = {i for _, i in work.gradients if work.sources[i].has_history}
    for node, position in work.gradients:
        if position not in goes_on:
            fixed[position] = _laid_out(work, work.owned(node, taken), position)
            taken.add(base_of(fixed[position]))
    whole: list[tuple[fx.Node, range]] = []  # parts of storages that are gradients without gaps
    for node, position in work.gradients:
        if position in goes_on:
            base, value = base_of(node), node.meta["val"]
            part = range(value.storage_offset(), value.storage_offset() + value.numel())
            is_whole = is_without_gaps(value)
            is_shared = base.op != "call_function" or base in taken
            is_shared |= is_whole and any(o is base and _overlap(part, p) for o, p in whole)
            fixed[position] = _with_own_strides(work, node) if is_shared else node
            if is_whole:
                whole.append((base_of(fixed[position]), part))
    work.gradients = [(fixed[position], position) for _, position in work.gradients]


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _laid_out(work: Rewriting, gradient: fx.Node, position: int) -> fx.Node:
    """Return a gradient with the strides of its parameter, or of an input.

    The strides are constants: an input that is read for them alone would be held until then.
    """
    like = work.placeholders[position].meta["val"]
    strides = like.stride()
    if gradient.meta["val"].stride() == strides or not is_without_gaps(like):
        return gradient
    return work.insert(gradient, _copy_strided, (gradient, strides), private.like(like))


def _with_own_strides(work: Rewriting, gradient: fx.Node) -> fx.Node:
    value = gradient.meta["val"]
    if is_without_gaps(value) or not _is_written_once(value):
        return work.cloned(gradient)
    return work.insert(gradient, _copy_with_strides, (gradient,), private.like(value))


def _is_written_once(value: torch.Tensor) -> bool:
    """Whether elements at different places are at different addresses, but for expanded ones."""
    end = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if stride and size > 1:
            if stride <= end:
                return False
            end += stride * (size - 1)
    return True


def added_up(gradient: fx.Node) -> fx.Node:
    """Return the node that autograd has added up for a gradient: before its layout is changed."""
    source = gradient.args[0] if gradient.target is _copy_strided else gradient
    assert isinstance(source, fx.Node)
    return source


def _copy_strided(source: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a copy of `source` with other strides, which leave no gaps."""
    return torch.empty_strided(
        source.shape, strides, dtype=source.dtype, device=source.device
    ).copy_(source)


def _copy_with_strides(source: torch.Tensor) -> torch.Tensor:
    """Return a copy of `source` with its strides, also where these leave gaps or are zero."""
    made = torch.empty_strided(
        source.shape, source.stride(), dtype=source.dtype, device=source.device
    )
    once = tuple(slice(None) if stride else slice(1) for stride in source.stride())
    made[once].copy_(source[once])
    return made
