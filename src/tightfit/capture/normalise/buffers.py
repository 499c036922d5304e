"""Buffers that a step writes: statistics, snapshots for backward, values of their own."""

from __future__ import annotations

import torch
from torch import fx

from tightfit.capture.nodes import ancestors_of, base_of, is_getitem, note_kept_forward
from tightfit.capture.normalise.rewriting import Rewriting, readers_of
from tightfit.torch_private import core as private

aten = torch.ops.aten


_BATCH_NORMS = (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
)


def correct_statistics(work: Rewriting) -> None:
    """Give the batch statistics of half-precision inputs the precision the kernel gives them.

    In evaluation they are empty, but backward wants their precision. The fake kernel says half
    precision where the CPU kernel returns single precision.
    """
    for node in work.graph.nodes:
        if node.target not in _BATCH_NORMS:
            continue
        x = node.args[0].meta["val"]
        if x.device.type != "cpu" or x.dtype not in (torch.bfloat16, torch.float16):
            continue
        tiny = [
            None if a is None else torch.ones(1, dtype=a.meta["val"].dtype) for a in node.args[1:5]
        ]
        sample = torch.ones(2, 1, 1, dtype=x.dtype)
        real = node.target(sample, *tiny, *node.args[5:])
        fixed = [
            fake if fake.dtype == true.dtype else private.like(fake, true.dtype)
            for fake, true in zip(node.meta["val"], real, strict=True)
        ]
        node.meta["val"] = tuple(fixed)
        for user in node.users:
            if is_getitem(user):
                user.meta["val"] = fixed[user.args[1]]


def own_write_backs(work: Rewriting) -> None:
    """Make the value copied into a buffer one of its own that is not kept elsewhere."""
    kept = {base_of(n) for n in work.returned}
    kept |= {base_of(n) for n, _ in work.gradients}
    forward = ancestors_of([*work.returned, *(n for n, _ in work.write_backs)])
    result = []
    for written, position in work.write_backs:
        node, base = written, base_of(written)
        read_later = any(user not in forward for user in readers_of(base))
        if base.op != "call_function" or base in kept or read_later:
            node = work.cloned(node)
        kept.add(base_of(node))
        result.append((node, position))
    work.set_write_backs(result)


def snapshot_mutated(work: Rewriting) -> None:
    """Let backward operators read a copy of a buffer the forward pass overwrites."""
    placeholders = work.placeholders
    forward = ancestors_of([*work.returned, *(n for n, _ in work.write_backs)])
    for _, position in work.write_backs:
        primal = placeholders[position]
        late = [n for n in readers_of(primal) if n not in forward]
        if not late:
            continue
        copy = work.cloned(primal)
        note_kept_forward(copy)
        rebuilt = {primal: copy}
        for node in late:
            for argument in node.all_input_nodes:
                if base_of(argument) is primal:
                    node.replace_input_with(argument, _rebuild(work, argument, rebuilt))


def _rebuild(work: Rewriting, view: fx.Node, rebuilt: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return the same chain of views over another base."""
    if view not in rebuilt:
        source = view.all_input_nodes[0]
        base = _rebuild(work, source, rebuilt)
        with work.graph.inserting_after(view):
            node = work.graph.node_copy(view, lambda n: base if n is source else n)
        rebuilt[view] = node
    return rebuilt[view]
