"""Planners by name, and the earlier plan that stands in for one that finds none."""

from __future__ import annotations

import math

import pytest

from support.papers import chain, peak_bytes
from support.planning import EVERY_PLANNER
from tightfit.errors import BadInput
from tightfit.plan.plan import Plan
from tightfit.planners.base import Limits, Task
from tightfit.planners.registry import find_planner, plan_with

GRAPH = chain([2, 4, 1])
TIGHT = Task(graph=GRAPH, budget_bytes=peak_bytes(GRAPH) - 2)


def earlier() -> Plan:
    """A plan of the step within the tight budget, which keeping everything exceeds."""
    plan = plan_with("anytime", TIGHT, Limits(seconds=5)).plan
    assert plan is not None
    return plan


def test_an_earlier_plan_is_used_where_the_planner_finds_none() -> None:
    assert plan_with("gist", TIGHT).plan is None
    roomy = Task(graph=GRAPH, budget_bytes=TIGHT.budget_bytes + 1)
    outcome = plan_with("gist", roomy, known=earlier())
    assert outcome.plan is not None
    assert outcome.plan.instructions == earlier().instructions
    assert outcome.plan.budget_bytes == roomy.budget_bytes
    assert (outcome.status, outcome.bound_source) == ("feasible", "trivial")


def test_an_earlier_plan_that_does_not_fit_is_not_used() -> None:
    smaller = Task(graph=GRAPH, budget_bytes=TIGHT.budget_bytes - 2)
    outcome = plan_with("gist", smaller, known=earlier())
    assert (outcome.plan, outcome.status) == (None, "unknown")
    proven = plan_with("anytime", Task(graph=GRAPH, budget_bytes=3), known=earlier())
    assert (proven.status, proven.bound) == ("infeasible", math.inf)


def test_a_planner_that_finds_a_plan_is_not_overruled() -> None:
    roomy = Task(graph=GRAPH, budget_bytes=peak_bytes(GRAPH))
    assert plan_with("gist", roomy, known=earlier()).overhead == 0.0


def test_an_unknown_planner_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match=r"no planner is called 'best' .*anytime, .*monet"):
        find_planner("best")
    with pytest.raises(BadInput, match=r"no option 'best' \(known: eviction:h_dtr_eq, .*:lru"):
        find_planner("eviction:best")
    assert all(find_planner(name).load() for name in EVERY_PLANNER if name != "intervals")
