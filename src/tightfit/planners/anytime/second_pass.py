"""Seeds for steps that may make gradients again, such as those that clip by the norm of all.

The step of a parameter reads a gradient that was kept since it was made, or one that a second pass
makes behind the backward. One such change alone costs time and saves nothing, so no search by small
changes finds them. Here the gradients of the layers that come first in the backward are made again,
up to one layer after the other: a short second pass is enough for them.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from tightfit._core import _engine
from tightfit.graph.ir import Graph, Op, OpId, ValueId
from tightfit.planners.anytime.pool import PooledSchedule
from tightfit.planners.anytime.search import Search
from tightfit.planners.engine.build import build_problem
from tightfit.planners.engine.greedy import descend
from tightfit.planners.engine.narrower import choices_in

_SHARES = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)  # of the bytes of gradients made again
_TIME_SHARE = 0.3  # of the search's time, for all of them
_DESCENT_S = 2.0  # for each


@dataclass(frozen=True)
class _Choosing:
    """An op that reads a gradient that is kept, or one that is made again."""

    op: OpId
    made_again: ValueId
    made_by: OpId  # makes it again
    size_bytes: int


def seed_with_second_pass(search: Search) -> None:
    """Add plans that make more and more gradients again, where the step has ops for that."""
    exactness = search.problem.exactness
    ops = _choosing(search.task.graph)
    if not ops or exactness is None:
        return
    until = (1.0 - _TIME_SHARE) * search.left()
    for graph in _with_shares(search.task.graph, ops):
        if search.pool.done or (not search.clock.counts and search.left() < until):
            return
        search.report()
        task = msgspec.structs.replace(search.task, graph=graph)
        problem = build_problem(task, exactness=exactness)
        schedule = _engine.Schedule(problem.engine, problem.budget_bytes)
        schedule.keep_everything()
        seconds = math.inf if search.clock.counts else min(_DESCENT_S, search.left())
        limits = msgspec.structs.replace(search.limits, seconds=seconds)
        if not descend(schedule, limits, search.progress, time.perf_counter()):
            continue
        choices = choices_in(search.problem, problem, schedule.first_choices())
        if choices is not None:
            own = search.schedules[0]
            own.load(schedule.ranges(), choices, [-1] * search.ops)
            search.add([PooledSchedule.of(own)])


def _choosing(graph: Graph) -> list[_Choosing]:
    """Return the ops that choose between two gradients, in the order of the second pass."""
    made_by = _made_again(graph)
    found: list[_Choosing] = []
    for op in graph.ops:
        read = {v for way in op.alternatives for v in way.reads if v in made_by}
        if op.required and len(read) == 1 and not all(read & {*w.reads} for w in op.alternatives):
            (value,) = read
            size_bytes = graph.values[value].size_bytes
            found.append(_Choosing(op.id, value, made_by[value], size_bytes))
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


def _with_shares(graph: Graph, choosing: list[_Choosing]) -> Iterator[Graph]:
    """Yield the graph where ever more gradients have to be made again, the others to be kept."""
    sums = list(itertools.accumulate(c.size_bytes for c in choosing))
    counts = (sum(size <= share * sums[-1] for size in sums) for share in (0.0, *_SHARES))
    for count in dict.fromkeys(counts):
        ops = list(graph.ops)
        for number, each in enumerate(choosing):
            ops[each.op] = _decided(ops[each.op], each.made_again, is_read=number < count)
        yield msgspec.structs.replace(graph, ops=tuple(ops))


def _decided(op: Op, value: ValueId, *, is_read: bool) -> Op:
    """Return an op with those of its alternatives that read a value, or that do not."""
    ways = tuple(way for way in op.alternatives if (value in way.reads) == is_read)
    return msgspec.structs.replace(op, alternatives=ways)
