"""Gradients as autograd would leave them: summed in place, each with a storage of its own."""

from __future__ import annotations

import torch
from torch import fx

from tightfit.capture.nodes import base_of
from tightfit.capture.normalise.rewriting import Rewriting, readers_of
from tightfit.torch_private import core as private

__all__ = ["own_gradients", "sum_in_place"]

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
        is_whole = base.meta["val"].numel() == given[0].numel() and _is_dense(given[0])
        if is_own and is_whole and all(t.shape == node.meta["val"].shape for t in given):
            node.target = aten.add_.Tensor
            node.meta["val"] = private.like(given[0])


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
