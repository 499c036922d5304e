"""The K-cut program relaxes every plan: cases by hand, and random steps with every feature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.graphs import compute_lists, training_graphs
from support.optimum import optimal_overhead
from tightfit.graph import Alternative, Choice, Graph, Op, Segment, Value, Variant, validate_graph
from tightfit.graph.liveness import budget_of_ratio, eager_peak_bytes
from tightfit.plan import assemble, simulate
from tightfit.planners.anytime.kcut.program import cut_program
from tightfit.planners.anytime.planner import run_anytime
from tightfit.planners.anytime.pool import Pool
from tightfit.planners.anytime.relaxation import relaxed
from tightfit.planners.base import Limits, Task
from tightfit.planners.bounds import working_set_bytes
from tightfit.planners.engine.build import build_problem
from tightfit.planners.registry import plan_with
from tightfit.planners.solvers import SolveOptions, solve
from tightfit.progress import SILENT

TOLERANCE = 1e-6


def graph_of(*ops: Op, sizes: tuple[int, ...], segments: tuple[Segment, ...] = ()) -> Graph:
    """Ops that each write the value of their number, of the given size."""
    values = tuple(Value(id=i, name=f"v{i}", size_bytes=size) for i, size in enumerate(sizes))
    segments = segments or (Segment(id=0, phase="forward"),)
    return validate_graph(Graph(values=values, ops=ops, segments=segments))


def op(number: int, *reads: int, **fields: Any) -> Op:
    way = Alternative(reads=reads, writes=(number,), variants=(Variant(cost_s=1.0),))
    return Op(id=number, target="test", alternatives=(way,), **fields)


def optimum_and_bound(graph: Graph, budget: int, *cuts: int) -> tuple[float, float]:
    return optimal_overhead(graph, budget), bound_at(graph, budget, cuts)


def test_a_pinned_value_may_stay_for_a_recomputation_after_its_last_reader() -> None:
    ops = (op(0, pinned="by the test"), op(1, 0), op(2, 1), op(3, 2), op(4, 3), op(5, 4, 1))
    optimum, bound = optimum_and_bound(graph_of(*ops, sizes=(1, 3, 1, 3, 1, 0)), 5, 3)
    assert bound == pytest.approx(optimum) == pytest.approx(1 / 6)


def test_a_cut_at_an_optional_op_does_not_make_it_run() -> None:
    ops = (op(0), op(1, 0), op(2, 1), op(3, 0, required=False), op(4, 2))
    optimum, bound = optimum_and_bound(graph_of(*ops, sizes=(2, 1, 3, 9, 1)), 4, 3)
    assert bound == pytest.approx(optimum, abs=TOLERANCE) == pytest.approx(0.0)


def test_a_program_may_recompute_before_its_next_segment_begins() -> None:
    segments = tuple(Segment(id=i, phase="forward", program=i % 2) for i in range(3))
    ops = (op(0), op(1, 0), op(2, 1, segment=1), op(3, 0, 2, segment=2))
    graph = graph_of(*ops, sizes=(2, 1, 3, 0), segments=segments)
    optimum, bound = optimum_and_bound(graph, 5, 2, 3)
    assert bound == pytest.approx(optimum) == pytest.approx(1 / 4)


def test_the_baseline_counts_the_optional_ops_that_defaults_read() -> None:
    ops = (op(0), op(1, 0, required=False), op(2, 1), op(3, 2, 0))
    graph = graph_of(*ops, sizes=(2, 1, 1, 1))
    assert build_problem(Task(graph=graph, budget_bytes=9)).overhead(1 << 40) == pytest.approx(
        0.0, abs=1e-9
    )


def test_an_alternative_that_spares_an_optional_op_is_taken_though_everything_fits() -> None:
    dearer = Alternative(name="direct", reads=(0,), writes=(2,), variants=(Variant(cost_s=1.5),))
    last = op(2, 1)
    ops = (
        op(0),
        op(1, 0, required=False),
        msgspec.structs.replace(last, alternatives=(*last.alternatives, dearer)),
    )
    outcome = plan_with("anytime", Task(graph=graph_of(*ops, sizes=(1, 1, 1)), budget_bytes=9))
    assert outcome.overhead == pytest.approx(-1 / 6)
    assert outcome.status == "optimal"


def with_ways(first: Op, *ways: Alternative) -> Op:
    return msgspec.structs.replace(first, alternatives=(*first.alternatives, *ways))


def test_what_runs_again_by_any_of_its_ways_finds_what_that_reads() -> None:
    at_once = Alternative(
        name="at once", reads=(0,), writes=(2,), variants=(Variant(cost_s=1.0),), use="again"
    )
    ops = (op(0), op(1, 0), with_ways(op(2, 1), at_once), op(3, 2), op(4, 3), op(5, 4), op(6, 5, 2))
    optimum, bound = optimum_and_bound(graph_of(*ops, sizes=(3, 3, 3, 1, 6, 1, 0)), 8, 4)
    assert bound == pytest.approx(optimum, abs=TOLERANCE) == pytest.approx(2 / 7)


def test_what_an_optional_op_made_before_the_first_cut_has_cost_something() -> None:
    from_mask = Alternative(name="mask", reads=(3, 1), writes=(4,), variants=(Variant(cost_s=1.0),))
    ops = (
        op(0, pinned="by the test"),
        op(1, 0, required=False),
        op(2, 0),
        op(3, 2),
        with_ways(op(4, 3, 0), from_mask),
    )
    optimum, bound = optimum_and_bound(graph_of(*ops, sizes=(4, 1, 1, 4, 0)), 6, 3)
    assert bound == pytest.approx(optimum, abs=TOLERANCE) == pytest.approx(1 / 4)


def test_what_ran_before_the_first_cut_had_its_inputs_made() -> None:
    cheap = Alternative(name="cheap", reads=(1,), writes=(2,), variants=(Variant(cost_s=0.5),))
    ops = (
        op(0),
        op(1, 0, required=False),
        with_ways(op(2, 0), cheap),
        op(3, 2, required=False),
        op(4, 3, required=False),
        op(5, 4),
    )
    optimum, bound = optimum_and_bound(graph_of(*ops, sizes=(1, 1, 1, 1, 1, 1)), 3, 5)
    assert bound == pytest.approx(optimum, abs=TOLERANCE) == pytest.approx(0.0)


def test_linked_alternatives_are_not_mixed() -> None:
    fast = (Variant(cost_s=0.5),)
    made = Alternative(name="made", reads=(1,), writes=(2,), variants=(Variant(cost_s=2.0),))
    used = Alternative(name="used", reads=(1,), writes=(4,), variants=fast)
    ops = (op(0), op(1), with_ways(op(2, 0), made), op(3, 2), with_ways(op(4, 3), used))
    linked = Choice(branches=(((2, 0), (4, 0)), ((2, 1), (4, 1))))
    graph = msgspec.structs.replace(graph_of(*ops, sizes=(1,) * 5), choices=(linked,))
    optimum, bound = optimum_and_bound(validate_graph(graph), 9, 3)
    assert bound == pytest.approx(optimum, abs=TOLERANCE) == pytest.approx(0.0)


def test_a_cut_counts_the_workspace_of_the_way_its_op_takes() -> None:
    fast, slow = Variant(cost_s=1.0, workspace_bytes=3), Variant(cost_s=2.0)
    one = msgspec.structs.replace(op(2, 1).alternatives[0], variants=(fast, slow))
    chosen = msgspec.structs.replace(op(2, 1), alternatives=(one,))
    graph = graph_of(op(0, pinned="by the test"), op(1, 0), chosen, op(3, 2, 0), sizes=(2, 1, 1, 0))
    for budget, expected in ((7, 0.0), (5, 1 / 4), (4, 1 / 4)):  # 4: too little in any plan
        optimum, bound = optimum_and_bound(graph, budget, 2)
        assert bound == pytest.approx(optimum, abs=TOLERANCE) == pytest.approx(expected)
    alone = relaxed(build_problem(Task(graph=graph, budget_bytes=4))).trivial_bound
    assert alone == pytest.approx(1 / 4, abs=TOLERANCE)


def test_a_target_survives_a_proof_of_infeasibility_by_another_thread() -> None:
    problem = build_problem(Task(graph=graph_of(op(0), sizes=(1,)), budget_bytes=9))

    class RaisedMeanwhile(Pool):
        bounds: ClassVar[list[float]] = [0.1, math.inf]

        @property
        def bound(self) -> float:
            return self.bounds.pop(0)

        @bound.setter
        def bound(self, bound: float) -> None:
            pass

    assert RaisedMeanwhile(problem, gap=1e-4).target == problem.cost_at(0.1 + 0.9e-4)


def bound_at(graph: Graph, budget: int, cuts: Sequence[int]) -> float:
    problem = build_problem(Task(graph=graph, budget_bytes=budget))
    model = cut_program(relaxed(problem), problem.budget_bytes, cuts)
    answer = solve(model.program, SolveOptions(seconds=10))
    return math.inf if answer.status == "infeasible" else model.overhead(answer.bound)


def draw_cuts(data: st.DataObject, graph: Graph) -> list[int]:
    """One to three ops of the engine's problem: ops of the graph and crossings."""
    ops = build_problem(Task(graph=graph, budget_bytes=1 << 40)).engine.op_count
    return sorted(data.draw(st.sets(st.integers(1, ops - 1), min_size=1, max_size=3)))


@given(training_graphs(max_layers=2), st.floats(0.0, 1.0), st.data())
@settings(max_examples=60)
def test_no_bound_exceeds_the_optimum(graph: Graph, share: float, data: st.DataObject) -> None:
    least, _ = working_set_bytes(graph)
    budget = least + round(share * (eager_peak_bytes(graph) - least))
    bound = bound_at(graph, budget, draw_cuts(data, graph))
    assert bound <= optimal_overhead(graph, budget) + TOLERANCE


@given(training_graphs(max_layers=6), st.data())
@settings(max_examples=60)
def test_no_bound_exceeds_the_overhead_of_a_schedule(graph: Graph, data: st.DataObject) -> None:
    schedule = data.draw(compute_lists(graph))
    result = simulate(graph, assemble(graph, schedule, budget_bytes=1 << 40))
    bound = bound_at(graph, result.peak_bytes, draw_cuts(data, graph))
    assert bound <= result.overhead + TOLERANCE


@given(training_graphs(max_layers=6), st.floats(0.3, 1.0), st.data())
@settings(max_examples=25)
def test_no_bound_exceeds_the_overhead_of_a_plan(
    graph: Graph, ratio: float, data: st.DataObject
) -> None:
    budget = budget_of_ratio(graph, ratio)
    task = Task(graph=graph, budget_bytes=budget)
    outcome = run_anytime(task, Limits(iterations=100, workers=1), SILENT).outcome
    assert outcome.bound_source != "withdrawn"
    assert bound_at(graph, budget, draw_cuts(data, graph)) <= outcome.overhead + TOLERANCE
