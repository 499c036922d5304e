"""The quickest plan with moves of a small graph, by exhaustive search over what may be where.

A state is how many ops were first computed, what is alive near, what is far away, and how long
each transfer under way still takes. Dijkstra's algorithm finds the least time over all lists of
computes, frees, stores and loads in the graph's order. Shares no code with any planner, nor with
the simulator.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

from support.links import LinkState
from support.shortest import shortest
from tightfit.graph import Alternative, Graph, Op, Segment, Value, Variant, validate_graph
from tightfit.plan import Far


def random_graph(seed: int, count: int) -> Graph:
    """Return a connected DAG of one-output ops; the second half reads what the first made."""
    draw = random.Random(seed)
    values = tuple(Value(id=i, name=f"v{i}", size_bytes=draw.randint(1, 6)) for i in range(count))
    forward = (count + 1) // 2
    ops = []
    for i in range(count):
        reads = {i - 1} if i else set()
        if i >= forward:
            reads.add(max(0, 2 * forward - 2 - i))
        elif i > 1 and draw.random() < 0.3:
            reads.add(draw.randrange(i - 1))
        way = Alternative(
            reads=tuple(sorted(reads)),
            writes=(i,),
            variants=(Variant(cost_s=float(draw.randint(1, 6))),),
        )
        ops.append(Op(id=i, target="test", alternatives=(way,), segment=int(i >= forward)))
    segments = (Segment(id=0, phase="forward"), Segment(id=1, phase="backward"))
    return validate_graph(Graph(values=values, ops=tuple(ops), segments=segments))


def least_time_s(graph: Graph, budget_bytes: int, far: Far) -> float:
    """Return the least time of any plan of a graph of one-output ops; ``inf`` if there is none."""

    def ending(state: LinkState) -> float | None:
        is_done = state.done == len(graph.ops)
        return max(state.stores_s, state.loads_s) if is_done else None

    return shortest(LinkState(), partial(_moves, graph, budget_bytes, far), ending)


def _moves(
    graph: Graph, budget: int, far: Far, state: LinkState
) -> Iterator[tuple[float, LinkState]]:
    size = [value.size_bytes for value in graph.values]
    held = sum(size[v] for v in state.alive)
    for value in sorted(state.alive):
        yield state.without(value)
        if value not in state.stored:
            yield 0.0, state.with_store(value, size[value], far)
    for value in sorted(state.stored - state.alive):
        if held + size[value] <= budget:
            yield 0.0, state.with_load(value, size[value], far)
    for op in graph.ops[: state.done + 1]:
        (way,) = op.alternatives
        (made,) = way.writes
        if not state.alive.issuperset(way.reads) or held + size[made] > budget:
            continue
        if op.id < state.done and made in state.alive:
            continue
        wait = max((s for v, s in state.coming if v in way.reads), default=0.0)
        took = wait + way.variants[0].cost_s
        after = state.later(took)
        yield (
            took,
            after._replace(
                done=max(state.done, op.id + 1),
                alive=after.alive | {made},
            ),
        )
