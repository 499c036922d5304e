"""The implementations MONeT chooses among: one per op (MONeT-NoOp) or all that serve."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec

from tightfit.graph.ir import Graph, OpId
from tightfit.planners.papers.stages.staged import (
    Implementation,
    Node,
    Staged,
    implementation,
    serves_again,
    usable_again,
)


@dataclass(frozen=True)
class Implementations:
    """For each node, the ways to compute it first and again (none: it may not be recomputed)."""

    first: tuple[tuple[Implementation, ...], ...]
    again: tuple[tuple[Implementation, ...], ...]

    def ways(self, node: int, *, again: bool) -> tuple[Implementation, ...]:
        return self.again[node] if again else self.first[node]


def single_implementations(problem: Staged) -> Implementations:
    """Return one implementation per op: MONeT-NoOp."""
    return Implementations(
        first=tuple((node.first,) for node in problem.nodes),
        again=tuple(() if node.again is None else (node.again,) for node in problem.nodes),
    )


def all_implementations(graph: Graph, problem: Staged) -> Implementations:
    """Return all implementations that serve: MONeT.

    Those with just the results of the default, of values that the nodes make; none that writes over
    its input, or that is linked to one of another op. Among implementations with equal inputs, a
    more expensive one stays only if it needs less workspace.
    """
    linked = {pair for choice in graph.choices for branch in choice.branches for pair in branch}
    usable = usable_again(graph, [node.first.compute for node in problem.nodes])
    first = [_first(graph, problem, node, linked) for node in problem.nodes]
    again = [
        ()
        if node.again is None
        else _undominated(
            implementation(graph, op, number, variant)
            for op in (graph.ops[node.first.compute.op],)
            for number, way in enumerate(op.alternatives)
            if serves_again(graph, op, way, usable) and way.writes == node.again.writes
            for variant in range(len(way.variants))
        )
        for node in problem.nodes
    ]
    return Implementations(first=tuple(first), again=tuple(again))


def _first(
    graph: Graph, problem: Staged, node: Node, linked: Collection[tuple[OpId, int]]
) -> tuple[Implementation, ...]:
    op = graph.ops[node.first.compute.op]
    ways = (
        implementation(graph, op, number, variant)
        for number, way in enumerate(op.alternatives)
        if way.use != "again" and way.writes == node.first.writes and way.overwrites is None
        if number == 0 or (op.id, number) not in linked
        for variant in range(len(way.variants))
    )
    return _undominated(way for way in ways if problem.values.keys() >= set(way.reads))


def _undominated(ways: Iterable[Implementation]) -> tuple[Implementation, ...]:
    """Return, for each set of values read, the cheapest way and cheaper ones in bytes."""
    kept: dict[tuple[int, ...], list[Implementation]] = {}
    for way in sorted(ways, key=lambda way: (way.cost_s, way.workspace_bytes)):
        alike = kept.setdefault(way.reads, [])
        if not alike or way.workspace_bytes < alike[-1].workspace_bytes:
            alike.append(way)
    return tuple(way for alike in kept.values() for way in alike)


def reading_any(problem: Staged, implementations: Implementations) -> Staged:
    """Return the problem with nodes that read all that any of their implementations reads."""

    def widened(way: Implementation, ways: Iterable[Implementation]) -> Implementation:
        reads = {value for other in ways for value in other.reads}
        return msgspec.structs.replace(way, reads=tuple(sorted(reads)))

    nodes = tuple(
        msgspec.structs.replace(
            node,
            first=widened(node.first, first),
            again=None if node.again is None else widened(node.again, again),
        )
        for node, first, again in zip(
            problem.nodes, implementations.first, implementations.again, strict=True
        )
    )
    return msgspec.structs.replace(problem, nodes=nodes)
