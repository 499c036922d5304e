"""Giving every variant of every alternative of a graph a cost."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tightfit.graph.ir import Alternative, Graph, Op


def price(graph: Graph, cost_of: Callable[[Op, Alternative], float], source: str) -> Graph:
    """Return the graph with costs; variants of one alternative get the same modelled cost.

    `cost_of`: the cost of running an op by one of its alternatives, in seconds. `source`: where the
    costs come from; kept in `Graph.cost_source`.
    """
    replace = msgspec.structs.replace

    def priced(op: Op, alternative: Alternative) -> Alternative:
        cost = cost_of(op, alternative)
        variants = tuple(replace(variant, cost_s=cost) for variant in alternative.variants)
        return replace(alternative, variants=variants)

    ops = tuple(
        replace(op, alternatives=tuple(priced(op, a) for a in op.alternatives)) for op in graph.ops
    )
    return replace(graph, ops=ops, cost_source=source)


# Operators that look up a few places of their first argument.
_LOOKUPS = frozenset({"embedding", "gather", "index", "index_select"})


def traffic_bytes(graph: Graph, op: Op, alternative: Alternative) -> int:
    """Return the bytes an alternative moves: every value it reads and every value it writes.

    A view counts as the whole value it belongs to; a lookup reads from each value at most as
    much as it writes.
    """
    sizes = [graph.values[v].size_bytes for v in alternative.reads]
    written = graph.bytes_of(alternative.writes)
    if operator_name(op.target) in _LOOKUPS:
        sizes = [min(size, written) for size in sizes]
    return sum(sizes) + written


def operator_name(target: str) -> str:
    """Return ``"add"`` for ``"aten.add.Tensor"``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else parts[0]
