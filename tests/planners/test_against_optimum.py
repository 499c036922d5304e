"""Planners against exhaustive search on small graphs."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.graphs import training_graphs
from support.optimum import optimal_overhead, small_graphs
from support.orders import least_peak_of_any_order
from tightfit.graph import Alternative, Graph, Op, Segment, Value, Variant, validate_graph
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan.plan import Compute, Plan
from tightfit.planners.base import Limits, Task
from tightfit.planners.bounds import working_set_bytes
from tightfit.planners.orders.reorder import reorder
from tightfit.planners.registry import plan_with

TOLERANCE = 1e-9


def tight_budget(graph: Graph, share: float) -> int:
    """A budget between what one op needs and what keeping everything needs."""
    least, _ = working_set_bytes(graph)
    return least + round(share * (eager_peak_bytes(graph) - least))


@given(small_graphs(), st.floats(0.0, 1.0))
def test_greedy_is_never_cheaper_than_the_optimum(graph: Graph, share: float) -> None:
    budget = tight_budget(graph, share)
    outcome = plan_with("greedy", Task(graph=graph, budget_bytes=budget), Limits(seconds=1))
    optimum = optimal_overhead(graph, budget)
    if outcome.plan is not None:
        assert outcome.overhead >= optimum - TOLERANCE
    assert outcome.bound <= optimum + TOLERANCE


def test_what_user_code_holds_at_a_crossing_is_gone_when_something_is_computed_again() -> None:
    values = (Value(id=0, name="small", size_bytes=1), Value(id=1, name="large", size_bytes=8))
    ops = [
        Op(
            id=i,
            target="test",
            segment=i,
            alternatives=(
                Alternative(
                    reads=(0,) * i, writes=(i,), variants=(Variant(cost_s=1.0, workspace_bytes=i),)
                ),
            ),
        )
        for i in range(2)
    ]
    segments = (
        Segment(id=0, phase="forward"),
        Segment(id=1, phase="backward", outside_bytes=10),
    )
    graph = validate_graph(Graph(values=values, ops=tuple(ops), segments=segments))
    assert optimal_overhead(graph, 11) == 0.0
    assert optimal_overhead(graph, 10) == 0.5
    for planner in ("greedy", "anytime"):
        outcome = plan_with(planner, Task(graph=graph, budget_bytes=10), Limits(seconds=1))
        assert outcome.overhead == 0.5


@given(training_graphs(max_layers=2), st.floats(0.0, 1.0))
@settings(max_examples=25)
def test_greedy_on_every_feature_of_the_format(graph: Graph, share: float) -> None:
    budget = tight_budget(graph, share)
    outcome = plan_with("greedy", Task(graph=graph, budget_bytes=budget), Limits(seconds=1))
    optimum = optimal_overhead(graph, budget)
    if outcome.plan is not None:
        assert outcome.overhead >= optimum - TOLERANCE
    assert (outcome.status == "infeasible") <= (optimum == float("inf"))


@given(small_graphs(), st.floats(0.0, 1.0))
def test_the_default_finds_the_optimum_of_small_graphs(graph: Graph, share: float) -> None:
    budget = tight_budget(graph, share)
    outcome = plan_with("anytime", Task(graph=graph, budget_bytes=budget), Limits(seconds=2))
    fits = least_peak_of_any_order(graph) <= budget  # then nothing has to be recomputed
    optimum = 0.0 if fits else optimal_overhead(graph, budget)
    if optimum == float("inf") and outcome.plan is not None:  # there is one in another order only
        optimum = optimal_overhead(reorder(graph, order_of(outcome.plan)), budget)
    assert outcome.overhead == pytest.approx(optimum, abs=1e-6)


def order_of(plan: Plan) -> list[int]:
    """Return the ops in the order in which they are first computed."""
    return list(dict.fromkeys(s.op for s in plan.instructions if isinstance(s, Compute)))


def test_a_plan_in_another_order_where_the_traced_one_has_none() -> None:
    """Found by the test above: 3 bytes suffice where the fifth op runs first of its segment."""
    reads = [(), (0,), (0,), (0,), (0, 1), (2,)]
    sizes = [0, 1, 2, 0, 1, 0]
    values = tuple(Value(id=i, name=f"v{i}", size_bytes=size) for i, size in enumerate(sizes))
    ops = tuple(
        Op(
            id=i,
            target="test",
            alternatives=(Alternative(reads=read, writes=(i,), variants=(Variant(cost_s=1.0),)),),
            segment=int(i > 2),
            pinned="drawn" if i in (0, 2, 3, 5) else None,
        )
        for i, read in enumerate(reads)
    )
    segments = (Segment(id=0, phase="forward"), Segment(id=1, phase="backward"))
    graph = validate_graph(Graph(values=values, ops=ops, segments=segments))
    budget = tight_budget(graph, 0.0)
    outcome = plan_with("anytime", Task(graph=graph, budget_bytes=budget), Limits(seconds=2))
    assert optimal_overhead(graph, budget) == float("inf")
    assert outcome.plan is not None and outcome.overhead == pytest.approx(1 / 6)
    assert optimal_overhead(reorder(graph, order_of(outcome.plan)), budget) == pytest.approx(1 / 6)


@given(training_graphs(max_layers=2), st.floats(0.0, 1.0))
@settings(max_examples=25)
def test_the_default_finds_the_optimum_with_every_feature(graph: Graph, share: float) -> None:
    budget = tight_budget(graph, share)
    outcome = plan_with("anytime", Task(graph=graph, budget_bytes=budget), Limits(seconds=2))
    optimum = optimal_overhead(graph, budget)
    assert outcome.bound <= optimum + 1e-6
    if not graph.choices and "order only" not in outcome.note:
        assert outcome.overhead == pytest.approx(optimum, abs=1e-6)


@given(small_graphs(), st.floats(0.0, 1.0))
@settings(max_examples=50)
def test_search_and_bound_without_exhaustion(graph: Graph, share: float) -> None:
    """The pipeline for large graphs on small ones: valid bounds, plans, proofs.

    In the traced order, as the exhaustive search has it; another order may be better still.
    """
    budget = tight_budget(graph, share)
    task = Task(graph=graph, budget_bytes=budget, keeps_order=True)
    limits = Limits(seconds=10.0, iterations=400, workers=1)
    with patch("tightfit.planners.anytime.exhaustive._MOST_VALUES", 0):
        outcome = plan_with("anytime", task, limits)
    optimum = optimal_overhead(graph, budget)
    assert outcome.bound <= optimum + 1e-6
    assert outcome.overhead >= optimum - 1e-9
