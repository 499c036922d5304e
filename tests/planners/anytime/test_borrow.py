"""The search may start from other methods' plans, and is never worse than they are."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from support.papers import chain, peak_bytes, tasks
from tightfit._core import _engine
from tightfit.errors import BadInput
from tightfit.plan.plan import Compute
from tightfit.planners.anytime.borrow import borrowed_ranges
from tightfit.planners.anytime.planner import plan_anytime
from tightfit.planners.base import Limits, Registration, Task
from tightfit.planners.engine.build import build_problem
from tightfit.planners.papers.monet.planner import plan_monet
from tightfit.planners.questions import minimum
from tightfit.planners.registry import seeding_planners
from tightfit.progress import SILENT


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(task=tasks(most_nodes=8))
def test_a_borrowed_plan_costs_the_engine_no_more(task: Task) -> None:
    outcome = plan_monet(task, Limits(seconds=20), SILENT)
    if outcome.plan is None:
        return
    problem = build_problem(task, alternatives=False)
    computes = [step for step in outcome.plan.instructions if isinstance(step, Compute)]
    schedule = _engine.Schedule(problem.engine, problem.budget_bytes)
    schedule.keep_everything()
    schedule.load_ranges(borrowed_ranges(problem, task.graph, computes))
    assert schedule.fits
    assert problem.overhead(schedule.cost) <= outcome.overhead + 1e-6


@pytest.mark.parametrize("length", [12, 20])
def test_a_tight_chain_is_solved_and_proven(length: int) -> None:
    graph = chain([4 + number % 3 for number in range(length)])
    budget_bytes = int(0.45 * peak_bytes(graph))
    task = Task(graph=graph, budget_bytes=budget_bytes)
    limits = Limits(seconds=60, gap=1e-6)
    outcome = plan_anytime(task, limits, SILENT)
    assert outcome.status == "optimal"
    methods = seeding_planners(len(graph.ops))
    assert {"monet", "eviction", "ap_sqrt"} < {method.name for method in methods}
    for method in methods:
        other = method.load()(task, limits, SILENT)
        assert other.plan is None or outcome.overhead <= other.overhead + 1e-9


def test_methods_that_refuse_a_step_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BadInput("not this one")

    monkeypatch.setattr(Registration, "load", lambda _: refuse)
    graph = chain([4 + number % 3 for number in range(12)])
    budget_bytes = int(0.45 * peak_bytes(graph))
    task = Task(graph=graph, budget_bytes=budget_bytes)
    assert plan_anytime(task, Limits(seconds=20), SILENT).plan is not None
    assert minimum.minimum_budget(graph).found_bytes <= budget_bytes
