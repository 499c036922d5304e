"""Plans whose layout is within the budget."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from support.graphs import training_graphs
from tightfit.graph import Alternative, Graph, Op, Value, Variant, validate_graph
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.layout.within import height_of_plan, plan_within
from tightfit.plan.plan import Outcome, Plan
from tightfit.plan.simulate import simulate
from tightfit.plan.verify import verify
from tightfit.planners.base import Limits, Task
from tightfit.planners.registry import plan_with


def greedily(task: Task) -> Outcome:
    return plan_with("greedy", task, Limits(seconds=1))


@given(training_graphs(max_layers=6), st.floats(0.6, 1.2), st.floats(1.0, 1.3))
@settings(max_examples=50)
def test_what_fits_fits_laid_out(graph: Graph, share: float, fragmented: float) -> None:
    """Whatever a layout adds to the peak, no more than the budget is held, or it is said."""
    budgets: list[int] = []

    def planned(task: Task) -> Outcome:
        budgets.append(task.budget_bytes)
        return greedily(task)

    def height_of(graph: Graph, plan: Plan) -> int:
        return round(fragmented * simulate(graph, plan).peak_bytes)

    budget = round(share * eager_peak_bytes(graph))
    task = Task(graph=graph, budget_bytes=budget)
    outcome, height_bytes = plan_within(task, planned, height_of)
    assert budgets[0] == budget and len(budgets) <= 3
    assert all(a > b for a, b in pairwise(budgets))
    if outcome.plan is None:
        assert height_bytes is None and len(budgets) == 1
        return
    verify(outcome.plan, graph)
    assert height_bytes == height_of(graph, outcome.plan)
    assert (height_bytes > budget) == ("laid out, it takes" in outcome.note)


@given(training_graphs())
@settings(max_examples=30)
def test_the_height_is_at_least_the_peak(graph: Graph) -> None:
    outcome = greedily(Task(graph=graph, budget_bytes=1 << 30))
    assert outcome.plan is not None
    assert height_of_plan(graph, outcome.plan) >= outcome.peak_bytes


def test_a_layout_that_is_too_high_is_planned_again() -> None:
    """Four of six values are alive at once, three if one is computed again."""
    reads = ((), (0,), (1,), (2,), (3, 1), (4, 0))
    graph = validate_graph(
        Graph(
            values=tuple(Value(id=i, name=f"v{i}", size_bytes=2) for i in range(6)),
            ops=tuple(
                Op(
                    id=i,
                    target="test",
                    alternatives=(
                        Alternative(reads=reads[i], writes=(i,), variants=(Variant(cost_s=1.0),)),
                    ),
                )
                for i in range(6)
            ),
        )
    )

    def height_of(graph: Graph, plan: Plan) -> int:
        return simulate(graph, plan).peak_bytes + 2

    task = Task(graph=graph, budget_bytes=8)
    outcome, height_bytes = plan_within(task, greedily, height_of)
    assert outcome.plan is not None and outcome.plan.budget_bytes == 6
    assert (outcome.peak_bytes, height_bytes) == (6, 8)
    plan = plan_within(task, greedily)[0].plan
    assert plan is not None and plan.budget_bytes == 8
