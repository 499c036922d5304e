"""Recursive checkpointing over segments of a chain."""

from __future__ import annotations

import pytest

from tightfit._core import _engine
from tightfit.graph import Alternative, Graph, Op, Segment, Value, Variant, validate_graph
from tightfit.graph.liveness import budget_of_ratio
from tightfit.planners.anytime.chain import Split
from tightfit.planners.anytime.keep import KeepLists
from tightfit.planners.anytime.relaxation import relaxed
from tightfit.planners.anytime.segments import ChainSplitter
from tightfit.planners.base import Task
from tightfit.planners.engine.build import build_problem

LAYERS = 60


def chain_of_cells() -> Graph:
    """Cells of a wide inner value and a narrow result, and their backward ops."""
    values: list[Value] = []
    ops: list[Op] = []

    def add(size: int, reads: tuple[int, ...], segment: int) -> int:
        number = len(ops)
        values.append(Value(id=number, name=f"v{number}", size_bytes=size))
        way = Alternative(reads=reads, writes=(number,), variants=(Variant(cost_s=1.0),))
        ops.append(Op(id=number, target="test", segment=segment, alternatives=(way,)))
        return number

    state = add(10, (), 0)
    cells = []
    for _ in range(LAYERS):
        inner = add(40, (state,), 0)
        cells.append((state, inner))
        state = add(10, (inner,), 0)
    gradient = add(10, (state,), 1)
    for before, inner in reversed(cells):
        gradient = add(10, (gradient, before, inner), 1)
    segments = (Segment(id=0, phase="forward"), Segment(id=1, phase="backward"))
    return validate_graph(Graph(values=tuple(values), ops=tuple(ops), segments=segments))


@pytest.mark.parametrize("ratio", [0.2, 0.3, 0.4])
@pytest.mark.parametrize("most", [8, 15, 30])
def test_a_chain_is_planned_within_its_budget_and_cheaply(ratio: float, most: int) -> None:
    graph = chain_of_cells()
    problem = build_problem(Task(graph=graph, budget_bytes=budget_of_ratio(graph, ratio)))
    splitter = ChainSplitter(relaxed(problem), 2 * LAYERS + 1)
    split = Split(splitter, KeepLists(splitter), most)
    assert len(split.segments) <= most
    ranges = split.ranges(problem.budget_bytes)
    assert ranges is not None
    schedule = _engine.Schedule(problem.engine, problem.budget_bytes)
    schedule.load_ranges(ranges)
    assert schedule.check() == ""
    assert schedule.peak() <= 1.1 * problem.budget_bytes
    # at most about two more forward passes, which are two thirds of the step
    assert problem.overhead(schedule.cost) <= 1.4


def test_segments_that_look_the_same_share_their_options() -> None:
    graph = chain_of_cells()
    problem = build_problem(Task(graph=graph, budget_bytes=1000))
    splitter = ChainSplitter(relaxed(problem), 2 * LAYERS + 1)
    keep_lists = KeepLists(splitter)
    Split(splitter, keep_lists, 30)
    assert len(keep_lists.known) < 12
