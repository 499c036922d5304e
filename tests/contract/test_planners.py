"""What every registered planner must do; a new planner is tested by being registered."""

from __future__ import annotations

import importlib.util
import math
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.graphs import training_graphs
from support.planning import EVERY_PLANNER
from support.searches import InterruptedAt
from tightfit.errors import BadInput
from tightfit.graph import Alternative, Graph, Op, Segment, Value, Variant, validate_graph
from tightfit.graph.liveness import budget_of_ratio, eager_peak_bytes
from tightfit.plan import Outcome, simulate, verify
from tightfit.planners.base import Limits, Task
from tightfit.planners.registry import PLANNERS, find_planner, is_chain, plan_with

BRIEF = Limits(seconds=30.0, iterations=100, workers=1)
EXTRAS = {"cpsat": "ortools", "gurobi": "gurobipy"}


def chain(layers: int, *, with_skip: bool = False) -> Graph:
    """A chain of forward ops and their backward ops; all sizes and costs are equal."""
    ops: list[Op] = []

    def add(target: str, segment: int, reads: tuple[int, ...], partner: int | None) -> None:
        way = Alternative(reads=reads, writes=(len(ops),), variants=(Variant(cost_s=1.0),))
        ops.append(
            Op(
                id=len(ops),
                target=target,
                segment=segment,
                partner=partner,
                alternatives=(way,),
            )
        )

    for i in range(layers):
        skip = (0,) if with_skip and i == layers - 1 and layers > 2 else ()
        add("test.forward", 0, (i - 1, *skip) if i else (), None)
    for i in reversed(range(layers)):
        incoming = (len(ops) - 1,) if len(ops) > layers else ()
        add("test.backward", 1, (*incoming, i), i)
    values = tuple(Value(id=i, name=f"v{i}", size_bytes=100) for i in range(2 * layers))
    segments = (Segment(id=0, phase="forward"), Segment(id=1, phase="backward"))
    return validate_graph(Graph(name="chain", values=values, ops=tuple(ops), segments=segments))


def graph_for(name: str) -> Graph:
    return chain(8, with_skip=not find_planner(name).linear_only)


@pytest.fixture(params=sorted(EVERY_PLANNER))
def planner(request: pytest.FixtureRequest) -> str:
    extra = find_planner(request.param).extra
    if extra is not None and importlib.util.find_spec(EXTRAS[extra]) is None:
        pytest.skip(f"needs tightfit[{extra}]")
    return request.param


def check_outcome(outcome: Outcome, task: Task) -> None:
    """A plan is verified, within its budget and costs what is reported; a bound is one."""
    assert outcome.bound <= outcome.overhead
    if outcome.plan is None:
        assert outcome.overhead == math.inf
        assert outcome.status in ("infeasible", "unknown")
        assert (outcome.status == "infeasible") == (outcome.bound == math.inf)
        return
    verify(outcome.plan, task.graph)
    result = simulate(task.graph, outcome.plan)
    assert outcome.peak_bytes == result.peak_bytes <= task.budget_bytes
    assert outcome.overhead == pytest.approx(result.overhead, abs=1e-12)
    assert outcome.status in ("optimal", "feasible")
    assert outcome.bound_source


@pytest.mark.parametrize("ratio", [0.5, 0.75])
def test_it_plans_a_chain_within_the_budget(planner: str, ratio: float) -> None:
    graph = graph_for(planner)
    task = Task(graph=graph, budget_bytes=budget_of_ratio(graph, ratio))
    outcome = plan_with(planner, task, BRIEF)
    check_outcome(outcome, task)
    if find_planner(planner).looks_at_budget:
        assert outcome.plan is not None


def test_nothing_is_recomputed_when_everything_fits(planner: str) -> None:
    if not find_planner(planner).looks_at_budget:
        pytest.skip("does not look at the budget")
    graph = graph_for(planner)
    outcome = plan_with(planner, Task(graph=graph, budget_bytes=eager_peak_bytes(graph)), BRIEF)
    assert outcome.overhead == 0.0
    assert outcome.status == "optimal"


def test_an_impossible_budget_is_answered(planner: str) -> None:
    graph = graph_for(planner)
    outcome = plan_with(planner, Task(graph=graph, budget_bytes=199), BRIEF)
    assert outcome.plan is None
    if find_planner(planner).proves_infeasible:
        assert outcome.status == "infeasible"


def test_the_same_limits_give_the_same_plan(planner: str) -> None:
    graph = graph_for(planner)
    task = Task(graph=graph, budget_bytes=budget_of_ratio(graph, 0.6))
    first, second = (plan_with(planner, task, BRIEF) for _ in range(2))
    assert first.plan == second.plan


def test_an_interruption_ends_with_the_best_so_far(planner: str) -> None:
    graph = graph_for(planner)
    task = Task(graph=graph, budget_bytes=budget_of_ratio(graph, 0.6))
    check_outcome(plan_with(planner, task, BRIEF, InterruptedAt(0)), task)


def test_the_time_limit_is_kept(planner: str) -> None:
    graph = chain(60, with_skip=not find_planner(planner).linear_only)
    task = Task(graph=graph, budget_bytes=budget_of_ratio(graph, 0.3))
    started = time.perf_counter()
    check_outcome(plan_with(planner, task, Limits(seconds=2.0, gap=0.0, workers=1)), task)
    start_up_s = 4.0  # of a child process on a machine that does other things too
    assert time.perf_counter() - started < 2.0 * 1.2 + start_up_s


def test_a_method_for_chains_refuses_other_graphs() -> None:
    graph = chain(8, with_skip=True)
    assert is_chain(chain(8))
    assert not is_chain(graph)
    for name, entry in PLANNERS.items():
        if entry.linear_only:
            with pytest.raises(BadInput, match="chains only"):
                plan_with(name, Task(graph=graph, budget_bytes=10_000), BRIEF)


@given(
    training_graphs(max_layers=3), st.floats(0.3, 1.0), st.sampled_from(["fresh", "accumulated"])
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_plans_graphs_with_every_feature_of_the_format(
    planner: str, graph: Graph, ratio: float, gradients: str
) -> None:
    if find_planner(planner).linear_only:
        return
    budget = budget_of_ratio(graph, ratio, gradients=gradients)
    task = Task(graph=graph, budget_bytes=budget, gradients=gradients)
    check_outcome(plan_with(planner, task, Limits(seconds=2.0, iterations=20, workers=1)), task)
