"""Steps of thousands of ops: the engine's blocks and runs agree with a fresh computation."""

from __future__ import annotations

import random

import pytest

from tightfit._core import _engine
from tightfit.graph.ir import Alternative, Device, Graph, Op, Segment, Value, Variant
from tightfit.graph.liveness import budget_of_ratio
from tightfit.plan.verify import verified_peaks
from tightfit.planners.base import Limits, Task
from tightfit.planners.engine.build import build_problem
from tightfit.planners.registry import plan_with


def chain(length: int, *, in_place: bool = False) -> Graph:
    """A forward chain and its backward, which reads every value of the forward again."""
    values: list[Value] = []
    ops: list[Op] = []

    def add(reads: list[int], segment: int, size: int) -> int:
        number = len(values)
        values.append(Value(id=number, name=f"v{number}", size_bytes=size, role="computed"))
        ways = [Alternative(reads=tuple(reads), writes=(number,), variants=(_variant(number),))]
        if in_place and segment == 1:
            ways.append(
                Alternative(
                    name="over",
                    reads=tuple(reads),
                    writes=(number,),
                    variants=(_variant(number),),
                    overwrites=reads[0],
                )
            )
        ops.append(Op(id=len(ops), target="test.op", alternatives=tuple(ways), segment=segment))
        return number

    forward = [add([], 0, 64)]
    for _ in range(length - 1):
        forward.append(add([forward[-1]], 0, 64))
    gradient = forward[-1]
    for value in reversed(forward):
        gradient = add(list(dict.fromkeys((gradient, value))), 1, 64)
    values[gradient] = Value(
        id=gradient, name="out", size_bytes=64, role="computed", fate="returned"
    )
    segments = (
        Segment(id=0, phase="forward", program=0),
        Segment(id=1, phase="backward", program=0),
    )
    return Graph(
        values=tuple(values),
        ops=tuple(ops),
        segments=segments,
        device=Device(kind="cpu", granularity_bytes=64),
        constants_bytes={},
    )


def _variant(number: int) -> Variant:
    return Variant(cost_s=1.0 + number % 3, workspace_bytes=0)


@pytest.mark.parametrize("in_place", [False, True])
def test_runs_across_blocks_are_evaluated_as_from_scratch(in_place: bool) -> None:
    graph = chain(150, in_place=in_place)
    problem = build_problem(Task(graph=graph, budget_bytes=40 * 64, gradients="fresh"))
    schedule = _engine.Schedule(problem.engine, problem.budget_bytes)
    draw = random.Random(0)
    for number in range(120):
        mark = schedule.mark()
        before = (schedule.cost, schedule.overflow, schedule.fullest_stage(), schedule.peaks())
        stage = draw.randrange(1, schedule.stages)
        if draw.random() < 0.7:
            schedule.drop(draw.randrange(len(problem.sizes)), stage)
        else:
            for op in schedule.computed(stage)[:1]:
                schedule.retain(op, stage)
        if number % 10 == 0:
            assert schedule.check() == ""
        peaks = schedule.peaks()
        assert schedule.fullest_stage() == peaks.index(max(peaks))
        if draw.random() < 0.3:
            schedule.undo_to(mark)
            now = (schedule.cost, schedule.overflow, schedule.fullest_stage(), schedule.peaks())
            assert now == before
    assert schedule.check() == ""
    other = _engine.Schedule(problem.engine, 1 << 40)
    other.load(schedule.ranges(), schedule.first_choices(), schedule.again_choices())
    other.set_budget(problem.budget_bytes)
    assert other.check() == ""
    assert (other.cost, other.peaks()) == (schedule.cost, schedule.peaks())


@pytest.mark.parametrize("planner", ["greedy", "anytime"])
def test_a_step_of_ten_thousand_ops_gets_a_verified_plan(planner: str) -> None:
    graph = chain(5000)
    task = Task(graph=graph, budget_bytes=budget_of_ratio(graph, 0.5), gradients="fresh")
    seconds = 1e4 if planner == "greedy" else 1.0
    outcome = plan_with(planner, task, Limits(seconds=seconds))
    assert outcome.plan is not None
    assert verified_peaks(outcome.plan, graph)[0] <= task.budget_bytes
    assert 0 < outcome.overhead < 0.6
