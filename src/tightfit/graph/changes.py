"""Constants that an op writes over, and the ops that need their old content before."""

from __future__ import annotations

from collections.abc import Iterator

from tightfit.graph.ir import Graph, OpId, ValueId


def need_before_changes(graph: Graph) -> dict[OpId, tuple[OpId, ...]]:
    """Return for each op that changes constants the ops that have to come before it.

    They read a constant that it changes, or something that may be computed of one just for them:
    after the change that would give something else. A pinned op runs in its own place or not at
    all.
    """
    if not any(op.changes for op in graph.ops):
        return {}
    needed_by: list[int] = [0] * len(graph.values)  # of each value: ops, as bits of a number
    for op in reversed(graph.ops):
        own = 1 << op.id
        if op.pinned is None:
            for value in {v for way in op.alternatives for v in way.writes}:
                own |= needed_by[value]
        for value in {v for way in op.alternatives for v in way.reads}:
            needed_by[value] |= own
    return {op.id: _before(op.id, op.changes, needed_by) for op in graph.ops if op.changes}


def _before(op: OpId, changes: tuple[ValueId, ...], needed_by: list[int]) -> tuple[OpId, ...]:
    every = 0
    for value in changes:
        every |= needed_by[value]
    return tuple(other for other in bits(every) if other != op)


def bits(number: int) -> Iterator[int]:
    """Yield which bits of a number are set, the lowest first."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
