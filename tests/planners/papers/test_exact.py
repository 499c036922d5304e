"""Checkmate and MONeT find the optimum of their own search space."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from support.papers import SECOND, least_checkmate_overhead, least_monet_overhead, tasks
from tightfit.graph.ir import Alternative, Graph, Op, Segment, Value, Variant
from tightfit.plan.plan import Outcome
from tightfit.plan.simulate import baseline_cost_s, simulate
from tightfit.planners.base import Limits, Task
from tightfit.planners.outcomes import NO_PLAN_HERE
from tightfit.planners.papers.checkmate.planner import (
    plan_checkmate,
    plan_checkmate_rounding,
)
from tightfit.planners.papers.intervals.planner import plan_intervals
from tightfit.planners.papers.monet.planner import plan_monet, plan_monet_all
from tightfit.planners.registry import PLANNERS, plan_with
from tightfit.progress import SILENT

EXACT = Limits(seconds=60, gap=1e-7)
SETTINGS = settings(
    max_examples=120,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def check_optimum(outcome: Outcome, least: float) -> None:
    if math.isinf(least):
        assert outcome.plan is None
        assert outcome.status == "infeasible" or outcome.note == NO_PLAN_HERE
    else:
        assert outcome.plan is not None
        assert outcome.overhead == pytest.approx(least, abs=2e-6)
        assert outcome.bound <= least + 2e-6
        assert outcome.status == "optimal"


@SETTINGS
@given(tasks(most_nodes=7))
def test_checkmate_is_the_optimum_of_its_search_space(task: Task) -> None:
    check_optimum(plan_checkmate(task, EXACT, SILENT), least_checkmate_overhead(task))


def recomputable_backward() -> Task:
    """A backward op could run again, but MONeT's program computes only forward ops again.

    So nothing that only the second run of it would read is of use.
    """
    sizes = (2, 4, 4, 4, 4, 4, 3, 3, 4)
    values = tuple(
        Value(id=i, name=f"v{i}", size_bytes=size, role="computed" if i else "tangent")
        for i, size in enumerate(sizes)
    )
    values = (msgspec.structs.replace(values[0], segment=1), *values[1:])
    steps = [
        ((), (1,), 0, "random"),
        ((), (2,), 0, None),
        ((1,), (3,), 0, "random"),
        ((), (4,), 0, None),
        ((4,), (5, 6), 1, None),
        ((5, 2), (7,), 1, "random"),
        ((0,), (8,), 1, "random"),
    ]
    ops = tuple(
        Op(
            id=i,
            target=f"op{i}",
            alternatives=(
                Alternative(reads=reads, writes=writes, variants=(Variant(cost_s=1.0),)),
            ),
            segment=segment,
            pinned=pinned,
        )
        for i, (reads, writes, segment, pinned) in enumerate(steps)
    )
    segments = (Segment(id=0, phase="forward"), Segment(id=1, phase="backward"))
    return Task(graph=Graph(values=values, ops=ops, segments=segments), budget_bytes=13)


@SETTINGS
@given(tasks(most_nodes=7))
@example(recomputable_backward())
def test_monet_is_the_optimum_of_its_search_space(task: Task) -> None:
    check_optimum(plan_monet(task, EXACT, SILENT), least_monet_overhead(task))


@st.composite
def tasks_with_alternatives(draw: st.DrawFn) -> Task:
    """A random step whose backward ops may read something else of the forward instead."""
    task = draw(tasks(most_nodes=6))
    graph = task.graph
    forward = [op for op in graph.ops if not op.segment]
    made = [v for op in forward for v in op.alternatives[0].writes]
    readable = [v for v in made if graph.values[v].fate in ("none", "returned")]
    ops = list(graph.ops)
    for op in graph.ops[len(forward) :]:
        if not readable or not draw(st.integers(0, 2)):
            continue
        kept = [v for v in op.alternatives[0].reads if v not in made]
        reads = (*kept, draw(st.sampled_from(readable)))
        cost = draw(st.sampled_from([1, 2, 3])) * SECOND
        way = msgspec.structs.replace(
            op.alternatives[0], name="other", reads=reads, variants=(Variant(cost_s=cost),)
        )
        ops[op.id] = msgspec.structs.replace(op, alternatives=(*op.alternatives, way))
    return msgspec.structs.replace(task, graph=msgspec.structs.replace(graph, ops=tuple(ops)))


def least_monet_overhead_of_any_choice(task: Task) -> float:
    """The least over all choices of one alternative for each op."""
    costs: list[float] = []
    for ways in itertools.product(*(op.alternatives for op in task.graph.ops)):
        pairs = zip(task.graph.ops, ways, strict=True)
        ops = tuple(msgspec.structs.replace(op, alternatives=(way,)) for op, way in pairs)
        graph = msgspec.structs.replace(task.graph, ops=ops)
        chosen = msgspec.structs.replace(task, graph=graph)
        costs.append((1 + least_monet_overhead(chosen)) * baseline_cost_s(graph))
    return min(costs) / baseline_cost_s(task.graph) - 1


@settings(SETTINGS, max_examples=60)
@given(tasks_with_alternatives())
def test_monet_chooses_implementations_together_with_what_it_recomputes(task: Task) -> None:
    least = least_monet_overhead_of_any_choice(task)
    check_optimum(plan_monet_all(task, EXACT, SILENT), least)


@SETTINGS
@given(tasks(most_nodes=5))
def test_monet_with_the_looser_bound_is_the_optimum_of_its_smaller_space(task: Task) -> None:
    loose = plan_monet(task, EXACT, SILENT, "loose")
    check_optimum(loose, least_monet_overhead(task, loose=True))
    assert plan_monet(task, EXACT, SILENT).overhead <= loose.overhead + 2e-6


@SETTINGS
@given(tasks(most_nodes=7))
def test_rounding_lies_between_its_relaxation_and_the_optimum(task: Task) -> None:
    rounded = plan_checkmate_rounding(task, EXACT, SILENT)
    least = least_checkmate_overhead(task)
    assert rounded.bound <= least + 2e-6
    assert rounded.overhead >= least - 2e-6


@settings(parent=SETTINGS, max_examples=10)
@given(tasks(most_nodes=7))
def test_retention_intervals_are_checkmate_with_one_recomputation_per_op(task: Task) -> None:
    pytest.importorskip("ortools")
    intervals = plan_intervals(task, EXACT, SILENT)
    exact = plan_checkmate(task, EXACT, SILENT)
    assert intervals.overhead >= exact.overhead - 2e-6
    if exact.plan is not None:
        again = simulate(task.graph, exact.plan).recomputed
        if all(times == 1 for _, times in again):
            assert intervals.overhead == pytest.approx(exact.overhead, abs=2e-6)
            assert intervals.bound <= exact.overhead + 2e-6


@settings(parent=SETTINGS, max_examples=60)
@given(tasks(most_nodes=7))
def test_no_baseline_beats_the_optimum(task: Task) -> None:
    """Every heuristic's schedule is in Checkmate's search space, as its section 5.2 says."""
    exact = plan_checkmate(task, EXACT, SILENT)
    for name, entry in PLANNERS.items():
        can = entry
        if name != "eviction" and not (can.linear_only or can.looks_at_budget):
            found = plan_with(name, task, EXACT)
            assert exact.overhead <= found.overhead + 2e-6, name


@settings(parent=SETTINGS, max_examples=40)
@given(tasks(most_nodes=7))
def test_a_warm_start_changes_nothing_about_the_optimum(task: Task) -> None:
    limits = Limits(seconds=20, gap=1e-7, iterations=20, workers=1)
    warm = plan_with("checkmate+", task, limits)
    cold = plan_checkmate(task, EXACT, SILENT)
    assert warm.overhead <= cold.overhead + 2e-6
    assert warm.bound <= cold.overhead + 2e-6


@settings(parent=SETTINGS, max_examples=40)
@given(tasks(most_nodes=6))
def test_split_stages_only_add_schedules(task: Task) -> None:
    split = plan_checkmate(task, EXACT, SILENT, "split")
    assert split.overhead <= plan_checkmate(task, EXACT, SILENT).overhead + 2e-6
