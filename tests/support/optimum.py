"""The cheapest plan of a small graph by exhaustive search over what may be alive.

Every list of computes and frees whose first computations follow the graph's order is a path
through states (first computations done, values alive, whether the segment of the next one was
entered); Dijkstra's algorithm finds the cheapest.
Shares no code with any planner.
"""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st

from support.shortest import shortest
from tightfit.graph import Alternative, Graph, Op, Segment, Value, Variant, validate_graph
from tightfit.graph.ir import CONSTANT_ROLES
from tightfit.graph.liveness import computed_ops

State = tuple[int, frozenset[int], tuple[int, ...], bool]


@st.composite
def small_graphs(draw: st.DrawFn, max_ops: int = 7) -> Graph:
    """Draw a connected DAG of one-output ops; the first half is the forward segment."""
    count = draw(st.integers(3, max_ops))
    values = tuple(
        Value(id=i, name=f"v{i}", size_bytes=draw(st.integers(0, 6))) for i in range(count)
    )
    ops = []
    for i in range(count):
        most = min(i, 3)
        reads = draw(
            st.lists(st.integers(0, i - 1), min_size=min(1, most), max_size=most, unique=True)
            if i
            else st.just([])
        )
        variant = Variant(
            cost_s=float(draw(st.integers(1, 9))), workspace_bytes=draw(st.integers(0, 2))
        )
        way = Alternative(reads=tuple(sorted(reads)), writes=(i,), variants=(variant,))
        pinned = "drawn" if draw(st.integers(0, 9)) == 0 else None
        segment = int(i >= (count + 1) // 2)
        ops.append(Op(id=i, target="test", alternatives=(way,), pinned=pinned, segment=segment))
    segments = (Segment(id=0, phase="forward"), Segment(id=1, phase="backward"))
    return validate_graph(Graph(values=values, ops=tuple(ops), segments=segments))


def optimal_overhead(graph: Graph, budget_bytes: int) -> float:
    """Return the least overhead of any plan with fresh gradients, ``inf`` if there is none."""
    return _Search(graph, budget_bytes).run()


class _Search:
    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self.graph = graph
        self.budget = budget_bytes - graph.constant_bytes
        self.base = sum(
            min(v.cost_s for v in op.alternatives[0].variants) for op in computed_ops(graph)
        )
        self.replaced = {v.replaces for v in graph.values if v.fate == "written_back"}
        self.linked = sorted({op for c in graph.choices for b in c.branches for op, _ in b})

    def run(self) -> float:
        def ending(state: State) -> float | None:
            is_end = state[0] == len(self.graph.ops) and self.legal_end(state)
            return 0.0 if is_end else None

        start: State = (0, frozenset(), (), False)
        return shortest(start, self.moves, ending) / self.base - 1.0

    def legal_end(self, state: State) -> bool:
        taken = dict(zip(self.linked, state[2], strict=True))
        return self.crossed(len(self.graph.ops), state[1]) is not None and all(
            sum(all(taken[op] == way for op, way in branch) for branch in choice.branches) == 1
            for choice in self.graph.choices
        )

    def size(self, alive: frozenset[int]) -> int:
        values, ops = self.graph.values, self.graph.ops
        return sum(
            values[v].size_bytes if v >= 0 else ops[-v - 1].random_state_bytes for v in alive
        )

    def moves(self, state: State) -> Iterator[tuple[float, State]]:
        done, alive, taken, entered = state
        for value in alive:
            if value < 0 or self.graph.values[value].fate == "none":
                yield 0.0, (done, alive - {value}, taken, entered)
        if done == len(self.graph.ops):
            return
        if not entered:
            after = self.crossed(done, alive)
            if after is not None:
                yield 0.0, (done, after, taken, True)
            return
        op = self.graph.ops[done]
        segment = op.segment if done == 0 else max(op.segment, self.graph.ops[done - 1].segment)
        yield from self.first(op, state)
        for again in self.graph.ops[:done]:
            yield from self.again(again, segment, state)

    def crossed(self, done: int, alive: frozenset[int]) -> frozenset[int] | None:
        """What is alive after the crossings between first computations done-1 and done."""
        ops, segments = self.graph.ops, self.graph.segments
        before = ops[done - 1].segment if done else -1
        after = ops[done].segment if done < len(ops) else len(segments) - 1
        for segment in range(before + 1, after + 1):
            alive = frozenset(
                v for v in alive if v < 0 or self.graph.values[v].fate != "written_back"
            )
            if self.size(alive) + segments[segment].outside_bytes > self.budget:
                return None
            alive |= {v.id for v in self.graph.values if v.segment == segment}
            if self.size(alive) > self.budget:
                return None
        return alive

    def first(self, op: Op, state: State) -> Iterator[tuple[float, State]]:
        done, alive, taken, _ = state
        if not op.required:
            yield 0.0, (done + 1, alive, (*taken, -1) if op.id in self.linked else taken, False)
        for number, way in enumerate(op.alternatives):
            if way.use == "again":
                continue
            now = (*taken, number) if op.id in self.linked else taken
            held = [frozenset[int]()]
            if op.random_state_bytes and op.pinned is None:
                held.append(frozenset({-op.id - 1}))
            for extra in held:
                for cost, after in self.run_way(way, alive | extra):
                    yield cost, (done + 1, after, now, False)

    def again(self, op: Op, segment: int, state: State) -> Iterator[tuple[float, State]]:
        done, alive, taken, entered = state
        segments = self.graph.segments
        if op.pinned is not None or segments[op.segment].program != segments[segment].program:
            return
        if op.random_state_bytes and -op.id - 1 not in alive:
            return
        for way in op.alternatives:
            fates = {self.graph.values[v].fate for v in way.writes}
            if way.use == "first" or "handed_over" in fates or self.replaced & set(way.reads):
                continue
            if "written_back" in fates:
                continue
            if not op.required and (way.use != "any" or op.segment != segment):
                continue
            for cost, after in self.run_way(way, alive):
                yield cost, (done, after, taken, entered)

    def run_way(
        self, way: Alternative, alive: frozenset[int]
    ) -> Iterator[tuple[float, frozenset[int]]]:
        values = self.graph.values
        if any(v not in alive and values[v].role not in CONSTANT_ROLES for v in way.reads):
            return
        second = [v for v in way.writes if v in alive]
        after = alive | set(way.writes)
        if way.overwrites is not None:
            if second:
                return
            after -= {way.overwrites}
        during = self.size(after) + sum(values[v].size_bytes for v in second)
        for variant in way.variants:
            if during + variant.workspace_bytes <= self.budget:
                yield variant.cost_s, after
