"""Seeds for steps that may make gradients again, such as steps that clip by the norm of all.

The step of a parameter reads its kept gradient, or a gradient that a second pass makes after the
backward. One such change alone costs time and saves nothing, so no search by small changes finds
them. Each seed makes again the gradients that the backward makes first, up to some layer: a short
second pass is enough for these.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from tightfit.graph.ir import Graph, Op, OpId, ValueId
from tightfit.planners.anytime.search import Search
from tightfit.planners.anytime.seeds import add_greedy_plan, take_over
from tightfit.planners.engine.build import build_problem

_SHARES = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)  # of the bytes of gradients made again
_TIME_SHARE = 0.3  # of the search's time, for all of them


@dataclass(frozen=True)
class _GradientChoice:
    """An op that reads either a kept gradient or a gradient made again."""

    op: OpId
    made_again: ValueId
    made_by: OpId  # makes it again
    size_bytes: int


def seed_with_second_pass(search: Search) -> None:
    """Add plans that make more and more gradients again, where the step has ops for that."""
    exactness = search.problem.exactness
    if exactness is None or not (choosing := _choosing(search.task.graph)):
        return
    until = (1.0 - _TIME_SHARE) * search.left()
    for graph in _with_shares(search.task.graph, choosing):
        if search.pool.done or (not search.clock.counts_iterations and search.left() < until):
            return
        search.report()
        task = msgspec.structs.replace(search.task, graph=graph)
        limits = msgspec.structs.replace(search.limits, seconds=search.left())
        problem = build_problem(task, exactness=exactness)
        fewer = Search(task, problem, limits, search.progress, time.perf_counter())
        add_greedy_plan(fewer)
        take_over(search, fewer)


def _choosing(graph: Graph) -> list[_GradientChoice]:
    """Return the ops that choose between two gradients, in the order of the second pass."""
    made_by = _made_again(graph)
    found: list[_GradientChoice] = []
    for op in graph.ops if made_by else ():
        again = {v for way in op.alternatives for v in way.reads if v in made_by}
        if not op.required or len(again) != 1:
            continue
        (value,) = again
        if any(value not in way.reads for way in op.alternatives):
            size_bytes = graph.values[value].size_bytes
            found.append(_GradientChoice(op.id, value, made_by[value], size_bytes))
    return sorted(found, key=lambda choosing: choosing.made_by)


def _made_again(graph: Graph) -> Mapping[ValueId, OpId]:
    """Return the gradients that only optional ops make, and these ops."""
    return {
        value: op.id
        for op in graph.ops
        if not op.required
        for way in op.alternatives
        for value in way.writes
        if graph.values[value].role == "gradient"
    }


def _with_shares(graph: Graph, choosing: list[_GradientChoice]) -> Iterator[Graph]:
    """Yield the graph where ever more gradients have to be made again, the others to be kept."""
    sums = list(itertools.accumulate(c.size_bytes for c in choosing))
    counts = (sum(size <= share * sums[-1] for size in sums) for share in (0.0, *_SHARES))
    for count in dict.fromkeys(counts):
        ops = list(graph.ops)
        for number, each in enumerate(choosing):
            ops[each.op] = _decided(ops[each.op], each.made_again, is_read=number < count)
        yield msgspec.structs.replace(graph, ops=tuple(ops))


def _decided(op: Op, value: ValueId, *, is_read: bool) -> Op:
    """Return an op with only the alternatives that read a value, or only the others."""
    ways = tuple(way for way in op.alternatives if (value in way.reads) == is_read)
    return msgspec.structs.replace(op, alternatives=ways)
