"""The quickest plan with moves of a small graph, by exhaustive search over what may be where.

A state is how many ops were first computed, what is alive near, what lies far away, and how long
each transfer under way still takes. Dijkstra's algorithm finds the least time over all lists of
computes, frees, stores and loads in the graph's order. Shares no code with any planner, nor with
the simulator.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from tightfit.graph import Alternative, Graph, Op, Segment, Value, Variant, validate_graph
from tightfit.plan import Far

__all__ = ["least_time_s", "random_graph"]

Waits = tuple[tuple[int, float], ...]


class _State(NamedTuple):
    done: int
    alive: frozenset[int]
    stored: frozenset[int]
    storing: Waits  # value, seconds until its store has ended
    coming: Waits
    stores_s: float  # until the queue is empty
    loads_s: float

    def later(self, seconds: float) -> _State:
        def left(waits: Waits) -> Waits:
            return tuple((v, s - seconds) for v, s in waits if s > seconds)

        return self._replace(
            storing=left(self.storing),
            coming=left(self.coming),
            stores_s=max(0.0, self.stores_s - seconds),
            loads_s=max(0.0, self.loads_s - seconds),
        )


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
    start = _State(0, frozenset(), frozenset(), (), (), 0.0, 0.0)
    best = {start: 0.0}
    queue = [(0.0, 0, start)]
    ticket = 0
    least = math.inf
    while queue:
        time_s, _, state = heapq.heappop(queue)
        if time_s >= least:
            return least
        if time_s > best[state]:
            continue
        if state.done == len(graph.ops):
            least = min(least, time_s + max(state.stores_s, state.loads_s))
            continue
        for took_s, following in _moves(graph, budget_bytes, far, state):
            total = time_s + took_s
            if total < best.get(following, math.inf):
                best[following] = total
                ticket += 1
                heapq.heappush(queue, (total, ticket, following))
    return least


def _moves(graph: Graph, budget: int, far: Far, state: _State) -> Iterator[tuple[float, _State]]:
    size = [value.size_bytes for value in graph.values]
    held = sum(size[v] for v in state.alive)
    under_way = dict((*state.storing, *state.coming))
    for value in sorted(state.alive):
        wait = under_way.get(value, 0.0)
        after = state.later(wait)
        yield wait, after._replace(alive=after.alive - {value})
        if value not in state.stored:
            end = state.stores_s + far.store_s(size[value])
            yield (
                0.0,
                state._replace(
                    stored=state.stored | {value},
                    storing=(*state.storing, (value, end)),
                    stores_s=end,
                ),
            )
    for value in sorted(state.stored - state.alive):
        if held + size[value] <= budget:
            end = state.loads_s + far.load_s(size[value])
            yield (
                0.0,
                state._replace(
                    alive=state.alive | {value},
                    coming=(*state.coming, (value, end)),
                    loads_s=end,
                ),
            )
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
