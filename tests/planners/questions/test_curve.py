"""Curves are monotone, and a plan serves another batch size of the same model."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings

from support.graphs import training_graphs, two_layers
from tightfit.errors import InfeasibleBudget, InvalidPlan, PlanMismatch
from tightfit.graph import Graph
from tightfit.graph.liveness import budget_of_ratio, eager_peak_bytes
from tightfit.plan import verify
from tightfit.planners.base import Limits, Task
from tightfit.planners.questions.batch import largest_batch
from tightfit.planners.questions.curve import pareto_curve
from tightfit.planners.questions.request import PlanRequest
from tightfit.planners.questions.rescale import rescaled
from tightfit.planners.registry import plan_with

STEPS = Limits(iterations=60, workers=1)


@given(training_graphs(max_layers=8))
@settings(max_examples=10)
def test_a_curve_is_monotone_and_its_plans_are_valid(graph: Graph) -> None:
    budgets = [budget_of_ratio(graph, ratio) for ratio in (1.0, 0.8, 0.6, 0.5, 0.4)]
    points = pareto_curve(graph, budgets, limits=STEPS)
    assert [p.budget_bytes for p in points] == sorted(set(budgets), reverse=True)
    for point in points:
        if point.outcome.plan is not None:
            assert point.outcome.plan.budget_bytes == point.budget_bytes
            verify(point.outcome.plan, graph)
        assert point.outcome.bound <= point.outcome.overhead
    for larger, smaller in itertools.pairwise(points):
        assert larger.outcome.overhead <= smaller.outcome.overhead
        assert larger.outcome.bound <= smaller.outcome.bound


def times(graph: Graph, factor: int) -> Graph:
    """The graph at another batch size."""
    values = tuple(
        msgspec.structs.replace(v, size_bytes=factor * v.size_bytes) for v in graph.values
    )
    constants = {kind: factor * size for kind, size in graph.constants_bytes.items()}
    return msgspec.structs.replace(graph, values=values, constants_bytes=constants)


def test_a_plan_serves_another_batch_size() -> None:
    graph = two_layers()
    budget = eager_peak_bytes(graph)
    plan = plan_with("anytime", Task(graph=graph, budget_bytes=budget), STEPS).plan
    assert plan is not None
    triple = Task(graph=times(graph, 3), budget_bytes=3 * budget)
    verify(rescaled(plan, graph, triple).plan, triple.graph)
    with pytest.raises(InvalidPlan, match="more than its budget"):
        rescaled(plan, graph, msgspec.structs.replace(triple, budget_bytes=3 * budget - 800))
    other = msgspec.structs.replace(graph, ops=graph.ops[:-1], values=graph.values[:-1])
    with pytest.raises(PlanMismatch, match="more than sizes"):
        rescaled(plan, graph, Task(graph=other, budget_bytes=budget))


def test_the_largest_batch_is_verified_by_planning() -> None:
    graph = two_layers()
    least = eager_peak_bytes(graph)

    def of_batch(batch: int) -> Graph:
        return times(graph, batch)

    found = largest_batch(of_batch, PlanRequest(7 * least + least // 2, limits=STEPS))
    assert found.batch == 7
    assert found.outcome.plan is not None
    verify(found.outcome.plan, of_batch(7))
    with pytest.raises(InfeasibleBudget, match="batch of 1"):
        largest_batch(of_batch, PlanRequest(least // 2, limits=STEPS))
