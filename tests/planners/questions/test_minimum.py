"""The least budget is between its proven limit and the peak with nothing recomputed."""

from __future__ import annotations

from hypothesis import given

from support.graphs import training_graphs, two_layers
from support.papers import chain
from tightfit.graph import Graph
from tightfit.graph.forward import forward_of
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan import verify
from tightfit.planners.base import Limits
from tightfit.planners.questions.least_budgets import LeastBudgets
from tightfit.planners.questions.minimum import minimum_budget, proven_least_bytes


@given(training_graphs())
def test_the_plan_found_needs_what_is_said_and_no_plan_needs_less_than_the_limit(
    graph: Graph,
) -> None:
    least = minimum_budget(graph, limits=Limits(seconds=1.0, iterations=20))
    verify(least.plan, graph)
    assert least.plan.budget_bytes == least.found_bytes
    assert graph.constant_bytes <= least.lower_bytes <= least.found_bytes
    assert least.found_bytes <= eager_peak_bytes(graph)


@given(training_graphs())
def test_a_forward_alone_is_not_proven_to_need_more_than_the_step(graph: Graph) -> None:
    limits = Limits(seconds=1.0, iterations=20)
    alone = forward_of(graph)
    assert len(alone.ops) < len(graph.ops) and len(alone.values) == len(graph.values)
    found_bytes = minimum_budget(graph, limits=limits).found_bytes
    assert graph.constant_bytes <= proven_least_bytes(alone, "fresh", limits) <= found_bytes


def test_it_is_exact_where_one_op_needs_everything() -> None:
    least = minimum_budget(two_layers())
    assert least.lower_bytes == least.found_bytes == 4600


def test_a_busy_machine_leaves_no_time_and_still_less_is_found() -> None:
    graph = chain([8] * 12)
    least = minimum_budget(graph, limits=Limits(seconds=1e-6))
    assert least.found_bytes <= 0.6 * eager_peak_bytes(graph)


def test_searches_of_the_same_step_begin_where_earlier_ones_ended() -> None:
    graph = chain([8] * 12)
    known = LeastBudgets()
    thorough = known.find(graph, limits=Limits(seconds=5.0))
    known.find(graph.with_outside(1000), limits=Limits(seconds=0.1))
    again = known.find(graph.with_outside(1), limits=Limits(seconds=0.1))
    assert again.found_bytes <= thorough.found_bytes + 1
    accumulated = known.find(graph, "accumulated", Limits(seconds=0.1))
    verify(accumulated.plan, graph)


@given(training_graphs())
def test_whether_a_budget_has_a_plan_is_asked_without_the_smallest(graph: Graph) -> None:
    limits = Limits(seconds=1.0, iterations=20)
    least = minimum_budget(graph, limits=limits)
    eager_bytes = eager_peak_bytes(graph)
    known = LeastBudgets()
    assert known.within(graph, "fresh", limits, least.lower_bytes - 1) is None
    found = known.within(graph, "fresh", limits, eager_bytes)
    assert found is not None and found.budget_bytes <= eager_bytes
    verify(found, graph)


def test_an_answer_that_came_early_does_not_shorten_a_later_search() -> None:
    graph = chain([8] * 12)
    thorough = minimum_budget(graph, limits=Limits(seconds=2.0))
    known = LeastBudgets()
    assert known.within(graph, "fresh", Limits(seconds=2.0), eager_peak_bytes(graph)) is not None
    assert known.find(graph, limits=Limits(seconds=2.0)).found_bytes <= thorough.found_bytes
