"""Casts of weights under autocast: eager casts a weight once for all its readers.

While a step is traced autocast keeps no casts: a weight with several readers is cast for each of
them, and their gradients are added after the cast back. Eager adds them before, in low precision.
Here the trace is changed to do the same as eager.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from tightfit.capture.nodes import is_traced_in_backward
from tightfit.capture.normalise.rewriting import Rewriting
from tightfit.torch_private import core as private

aten = torch.ops.aten


def share_casts(work: Rewriting) -> None:
    """Cast each weight once in every region of autocast, as eager's cache does."""
    groups: dict[Any, list[fx.Node]] = {}
    for position, (node, source) in enumerate(zip(work.placeholders, work.sources, strict=True)):
        if source.kind != "parameter":
            continue
        for user in node.users:
            region = work.origins.region_at(user.meta.get("seq_nr"))
            if region is not None and _is_cast(user) and not is_traced_in_backward(user):
                key = (position, region, user.kwargs.get("dtype"))
                groups.setdefault(key, []).append(user)
    order = {node: i for i, node in enumerate(work.graph.nodes)}
    for (position, *_), casts in groups.items():
        if len(casts) > 1:
            _share(work, position, sorted(casts, key=order.__getitem__))


def _is_cast(node: fx.Node) -> bool:
    return node.target is aten._to_copy.default and node.kwargs.get("dtype") in (
        torch.bfloat16,
        torch.float16,
    )


def _share(work: Rewriting, position: int, casts: list[fx.Node]) -> None:
    numbers = {c.meta["seq_nr"] for c in casts}
    backs = [n for n in _terms(work, casts) if n.meta.get("seq_nr") in numbers]
    if backs:
        _sum_before_cast(work, position, backs)
    for cast in casts[1:]:
        cast.replace_all_uses_with(casts[0])
        work.graph.erase_node(cast)


def _terms(work: Rewriting, casts: list[fx.Node]) -> Iterator[fx.Node]:
    """Yield the casts back to full precision that the gradients of some weights add up."""
    weights = {c.args[0] for c in casts}
    waiting = [n for n, i in work.gradients if work.placeholders[i] in weights]
    while waiting:
        node = waiting.pop()
        if node.target is aten._to_copy.default:
            yield node
        elif node.target is aten.add.Tensor:
            waiting.extend(a for a in node.args if isinstance(a, fx.Node))


def _sum_before_cast(work: Rewriting, position: int, backs: list[fx.Node]) -> None:
    """Replace sum(cast(g) for g in gs) by cast(sum(gs)), in the order autograd adds."""
    index = next(i for i, (_, p) in enumerate(work.gradients) if p == position)
    root = work.gradients[index][0]
    members = set(backs)
    leaves = list(_leaves(root, members))
    last = max(i for i, leaf in enumerate(leaves) if leaf in members)
    graph = work.graph
    with graph.inserting_before(root.next):
        low = _chain(graph, [leaf.args[0] for leaf in leaves if leaf in members], root)
    with graph.inserting_before(low.next):
        cast = graph.call_function(aten._to_copy.default, (low,), dict(backs[0].kwargs))
    cast.meta = {**backs[-1].meta, "val": backs[0].meta["val"]}
    terms = [cast if i == last else leaf for i, leaf in enumerate(leaves)]
    terms = [t for t in terms if t is cast or t not in members]
    with graph.inserting_before(cast.next):
        total = _chain(graph, terms, cast)
    work.gradients[index] = (total, position)
    tail = graph.output_node()
    tail.replace_input_with(root, total)


def _leaves(node: fx.Node, members: set[fx.Node]) -> Iterator[fx.Node]:
    """Yield the terms of a tree of additions, in order."""
    inside = node.target is aten.add.Tensor and not node.kwargs and _sums(node, members)
    if node in members or not inside:
        yield node
        return
    for argument in node.args:
        assert isinstance(argument, fx.Node)
        yield from _leaves(argument, members)


def _sums(node: fx.Node, members: set[fx.Node]) -> bool:
    """Whether a node is an addition that a member takes part in."""
    if node in members:
        return True
    if node.target is not aten.add.Tensor or len(node.args) != 2:
        return False
    return any(isinstance(a, fx.Node) and _sums(a, members) for a in node.args)


def _chain(graph: fx.Graph, terms: list[Any], anchor: fx.Node) -> fx.Node:
    """Return the sum of nodes from left to right, made where the graph inserts now."""
    total = terms[0]
    for term in terms[1:]:
        added = graph.call_function(aten.add.Tensor, (total, term))
        added.meta = {**anchor.meta, "val": private.like(total.meta["val"])}
        total = added
    return total
