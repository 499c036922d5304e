"""The order in which backward ops that free memory run as soon as they can."""

from __future__ import annotations

from tightfit.graph.changes import need_before_changes
from tightfit.graph.ir import Graph, Op, OpId
from tightfit.graph.liveness import producers, readers
from tightfit.planners.orders.problem import keeps_its_place


def frees_early(graph: Graph) -> tuple[OpId, ...]:
    """Return the graph's ops with every backward op moved to where it stops costing memory.

    Within each backward segment the traced order is kept, but an op that frees at least as many
    bytes as it makes runs as soon as its inputs are there. Typically it makes a weight's gradient,
    after which the activation is not read any more. Values overwritten in place and pinned orders
    are respected, since every op still follows all it reads.
    """
    return _Arrangement(graph).order()


class _Arrangement:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made_by = producers(graph)
        self.readers = readers(graph)
        self.before = need_before_changes(graph)
        self.readers_left: dict[int, int] = {}
        for op in graph.ops:
            for value in self._reads(op):
                self.readers_left[value] = self.readers_left.get(value, 0) + 1
        self.done: set[OpId] = set()
        self.placed: list[OpId] = []

    def order(self) -> tuple[OpId, ...]:
        graph = self.graph
        for segment in graph.segments:
            ops = [op for op in graph.ops if op.segment == segment.id]
            # where a default works in place, the order of readers matters
            in_place = any(op.alternatives[0].overwrites is not None for op in ops)
            if segment.phase == "forward" or in_place:
                for op in ops:
                    self._place(op)
            else:
                self._arrange(ops)
        return tuple(self.placed)

    def _arrange(self, ops: list[Op]) -> None:
        members = {op.id for op in ops}
        for op in ops:
            if op.id in self.done:
                continue
            self._place(op)
            near = self._affected(op, members)
            while near:
                following = near.pop(0)
                if following.id in self.done or not self._ready(following):
                    continue
                if keeps_its_place(self.graph, following):
                    continue
                if self._growth(following) <= 0:
                    self._place(following)
                    near.extend(self._affected(following, members))

    def _affected(self, op: Op, members: set[OpId]) -> list[Op]:
        """Ops that may have become ready or freeing through this op."""
        touched = {*op.alternatives[0].writes, *self._reads(op)}
        ids = sorted({r for v in touched for r in self.readers[v]} & members - self.done)
        return [self.graph.ops[i] for i in ids]

    def _place(self, op: Op) -> None:
        self.placed.append(op.id)
        self.done.add(op.id)
        for value in self._reads(op):
            self.readers_left[value] -= 1

    def _reads(self, op: Op) -> set[int]:
        values = self.graph.values
        return {v for v in op.alternatives[0].reads if not values[v].is_constant}

    def _ready(self, op: Op) -> bool:
        """Whether everything that any of its alternatives reads has been made."""
        reads = {v for way in op.alternatives for v in way.reads if way.use != "again"}
        is_made = all(v not in self.made_by or self.made_by[v] in self.done for v in reads)
        return is_made and self.done.issuperset(self.before.get(op.id, ()))

    def _growth(self, op: Op) -> int:
        """Bytes alive after the op minus before it."""
        values = self.graph.values
        freed = (
            v for v in self._reads(op) if self.readers_left[v] == 1 and values[v].fate == "none"
        )
        return self.graph.bytes_of(op.alternatives[0].writes) - self.graph.bytes_of(freed)
