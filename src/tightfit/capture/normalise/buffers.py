"""Buffers that a step writes: statistics, snapshots for backward, values of their own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from tightfit.capture.calls.geometry import Geometry
from tightfit.capture.nodes import (
    ancestors_of,
    base_of,
    forward_nodes,
    is_getitem,
    is_view,
    note_kept_forward,
)
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
        _read_instead(work, late, primal, copy)


def read_written_inputs(work: Rewriting) -> None:
    """Let backward operators read the new content of an input in the input itself.

    There it is held once, as by an operator in place. Snapshots of the old content come before.
    """
    written_nodes = [node for node, _ in work.write_backs]
    forward = forward_nodes(work.graph, [*work.returned, *written_nodes])
    for written, position in work.write_backs:
        if _may_be_read_in(work, written, position):
            primal = work.placeholders[position]
            late = [n for n in readers_of(written) if n not in forward]
            _read_instead(work, late, written, primal)
            rebuilt = {written: primal}
            for index in _aliases_of(work, written):
                output = work.raw_outputs[index]
                work.raw_outputs[index] = _rebuild(work, output, rebuilt)


def _may_be_read_in(work: Rewriting, written: fx.Node, position: int) -> bool:
    """Whether an input has the new content as it was computed, and nothing else keeps that."""
    if work.sources[position].kind != "input" or written.op != "call_function":
        return False
    if is_view(written) or [n for n, _ in work.write_backs].count(written) > 1:
        return False
    given, new = work.placeholders[position].meta["val"], written.meta["val"]
    if Geometry.of(given) != Geometry.of(new):
        return False
    if any(base_of(n) is written for n, _ in work.gradients):
        return False
    return all(work.input_viewed(i) == position for i in _aliases_of(work, written))


def _aliases_of(work: Rewriting, base: fx.Node) -> list[int]:
    """Return the raw outputs in a storage, by their positions."""
    outputs = enumerate(work.raw_outputs)
    return [i for i, n in outputs if isinstance(n, fx.Node) and base_of(n) is base]


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
    work.write_backs = result


def _read_instead(
    work: Rewriting, readers: Iterable[fx.Node], base: fx.Node, other: fx.Node
) -> None:
    """Let some operators read another storage, by the same views."""
    rebuilt = {base: other}
    for node in readers:
        for argument in node.all_input_nodes:
            if base_of(argument) is base:
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
