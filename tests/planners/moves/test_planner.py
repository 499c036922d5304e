"""The default planner with far memory: never worse, within both budgets, the same every time."""

from __future__ import annotations

import math
import signal
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chains import chain_graph
from support.graphs import compute_lists, training_graphs
from support.moves import links, with_moves
from support.optimum_moves import random_graph
from tightfit.errors import BadInput
from tightfit.graph import Alternative, Graph, Op, Segment, Value, Variant, validate_graph
from tightfit.graph.ir import Use
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan import Compute, Far, Free, Load, Plan, Store, assemble, simulate, verify
from tightfit.plan.io import plan_to_json
from tightfit.planners.base import Limits, Task
from tightfit.planners.bounds import working_set_bytes
from tightfit.planners.moves.bound import MovesBound
from tightfit.planners.moves.evaluate import Choice, MovesEvaluator
from tightfit.planners.moves.tidy import tidy
from tightfit.planners.outcomes import plan_of
from tightfit.planners.registry import plan_with

LARGE = 1 << 40
LIMITS = Limits(iterations=400, seconds=60)
FAST = Far(capacity_bytes=LARGE, store_bytes_per_s=1e6, load_bytes_per_s=1e6)


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    graph = draw(training_graphs())
    least, _ = working_set_bytes(graph)
    share = draw(st.sampled_from([0.1, 0.4, 0.7]))
    budget = least + round(share * (eager_peak_bytes(graph) - least))
    return Task(graph=graph, budget_bytes=budget, far=draw(links))


@settings(max_examples=40, deadline=None)
@given(tasks())
def test_far_memory_never_makes_a_plan_worse(task: Task) -> None:
    plain = plan_with("anytime", msgspec.structs.replace(task, far=None), LIMITS)
    outcome = plan_with("anytime", task, LIMITS)
    assert outcome.overhead <= plain.overhead + 1e-12
    assert outcome.bound <= outcome.overhead + 1e-9
    if outcome.plan is not None:
        verify(outcome.plan, task.graph)
        assert outcome.peak_bytes <= task.budget_bytes
        assert outcome.overhead == simulate(task.graph, outcome.plan).overhead
        assert_every_load_is_read(task.graph, outcome.plan)


def assert_every_load_is_read(graph: Graph, plan: Plan) -> None:
    """An unread load takes room on the link, and freeing it would wait."""
    unread: set[int] = set()
    for step in plan.instructions:
        if isinstance(step, Load):
            unread.add(step.value)
        elif isinstance(step, Free):
            assert step.value not in unread
        elif isinstance(step, Compute):
            unread -= set(graph.ops[step.op].alternatives[step.alternative].reads)
    assert not unread


@st.composite
def moved_plans(draw: st.DrawFn) -> tuple[Graph, Plan]:
    graph = draw(training_graphs())
    steps = draw(with_moves(graph, draw(compute_lists(graph))))
    plan = assemble(graph, steps, budget_bytes=LARGE, far=draw(links))
    return graph, plan


@settings(deadline=None)
@given(moved_plans())
def test_the_bound_holds_for_every_plan_with_moves(case: tuple[Graph, Plan]) -> None:
    graph, plan = case
    result = simulate(graph, plan)
    far = plan.far
    assert far is not None
    task = Task(graph=graph, budget_bytes=result.peak_bytes, far=far)
    bound = MovesBound(task, "highs")
    bound.away(0.0, 10.0, None)
    assert bound.overhead <= result.overhead + 1e-6


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(0.0, 0.3), links, st.data())
def test_whatever_is_offered_to_be_moved_the_plan_is_legal(
    seed: int, share: float, far: Far, data: st.DataObject
) -> None:
    """Also of choices that the search judges and drops: another machine's clock may keep them."""
    graph = with_ways_in_place(random_graph(seed, 16))
    least, _ = working_set_bytes(graph)
    budget = least + round(share * (eager_peak_bytes(graph) - least))
    task = Task(graph=graph, budget_bytes=budget, far=far)
    evaluator = MovesEvaluator(task)
    start = None
    for toll in (0.01, 0.1, 1.0):
        values = data.draw(st.frozensets(st.sampled_from(sorted(evaluator.gaps))))
        pace = data.draw(st.sampled_from([0.8, 1.0, 8.0]))
        found = evaluator.evaluate(
            Choice(values, pace, toll), start, data.draw(st.sampled_from([0, 20]))
        )
        if found is not None:
            verify(plan_of(task, found.steps), graph)
            start = found.steps


def with_ways_in_place(graph: Graph) -> Graph:
    """Let each op write over the first value that it reads, though later ops read it too."""
    values = tuple(msgspec.structs.replace(value, size_bytes=4) for value in graph.values)
    ops = []
    for op in graph.ops:
        (way,) = op.alternatives
        in_place = [
            msgspec.structs.replace(way, name="in place", overwrites=value)
            for value in way.reads[:1]
        ]
        ops.append(msgspec.structs.replace(op, alternatives=(way, *in_place)))
    return validate_graph(msgspec.structs.replace(graph, values=values, ops=tuple(ops)))


@settings(deadline=None)
@given(moved_plans(), st.integers(0, 6))
def test_tidying_keeps_plans_legal_and_within_the_budget(
    case: tuple[Graph, Plan], room: int
) -> None:
    graph, plan = case
    peak = simulate(graph, plan).peak_bytes
    plan = msgspec.structs.replace(plan, budget_bytes=peak + room)
    tidied = tidy(graph, plan)
    verify(tidied, graph)


def test_a_fast_link_makes_the_step_as_quick_as_with_everything_kept(drawn_graph: Graph) -> None:
    budget = (working_set_bytes(drawn_graph)[0] + eager_peak_bytes(drawn_graph)) // 2
    task = Task(graph=drawn_graph, budget_bytes=budget, far=FAST)
    plain = plan_with("anytime", msgspec.structs.replace(task, far=None), LIMITS)
    outcome = plan_with("anytime", task, LIMITS)
    assert plain.overhead > 0.01
    assert outcome.overhead < 0.001
    assert outcome.plan is not None
    assert any(isinstance(step, Store) for step in outcome.plan.instructions)
    assert any(isinstance(step, Load) for step in outcome.plan.instructions)


def test_no_more_is_far_away_than_far_memory_holds(drawn_graph: Graph) -> None:
    budget = (working_set_bytes(drawn_graph)[0] + eager_peak_bytes(drawn_graph)) // 2
    for capacity in (0, 5, 10):
        far = msgspec.structs.replace(FAST, capacity_bytes=capacity)
        outcome = plan_with(
            "anytime", Task(graph=drawn_graph, budget_bytes=budget, far=far), LIMITS
        )
        assert outcome.plan is not None
        assert simulate(drawn_graph, outcome.plan).far_peak_bytes <= capacity


def test_equal_limits_give_equal_plans(drawn_graph: Graph) -> None:
    budget = (working_set_bytes(drawn_graph)[0] + eager_peak_bytes(drawn_graph)) // 2
    far = msgspec.structs.replace(FAST, store_bytes_per_s=2.0, load_bytes_per_s=2.0)
    task = Task(graph=drawn_graph, budget_bytes=budget, far=far)
    one, other = (plan_with("anytime", task, LIMITS) for _ in range(2))
    assert one.plan is not None
    assert other.plan is not None
    assert plan_to_json(one.plan) == plan_to_json(other.plan)


def test_planners_that_move_nothing_refuse_far_memory(drawn_graph: Graph) -> None:
    task = Task(graph=drawn_graph, budget_bytes=LARGE, far=FAST)
    with pytest.raises(BadInput, match="moves nothing to far memory"):
        plan_with("greedy", task, LIMITS)


def test_without_a_plan_and_a_proof_the_outcome_says_so(drawn_graph: Graph) -> None:
    task = Task(graph=drawn_graph, budget_bytes=1, far=FAST)
    outcome = plan_with("anytime", task, LIMITS)
    assert outcome.status == "infeasible"
    assert outcome.bound == math.inf


@pytest.mark.parametrize("when", ["evaluate", "search_around"])
def test_ctrl_c_leaves_the_best_plan_so_far(
    drawn_graph: Graph, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    budget = (working_set_bytes(drawn_graph)[0] + eager_peak_bytes(drawn_graph)) // 2
    far = msgspec.structs.replace(FAST, store_bytes_per_s=2.0, load_bytes_per_s=2.0)
    task = Task(graph=drawn_graph, budget_bytes=budget, far=far)
    plain = plan_with("anytime", msgspec.structs.replace(task, far=None), LIMITS)
    function, calls = getattr(MovesEvaluator, when), [0]

    def pressed(*given: Any) -> Any:
        found = function(*given)
        calls[0] += 1
        if calls[0] == (5 if when == "evaluate" else 1):
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(MovesEvaluator, when, pressed)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        outcome = plan_with("anytime", task, Limits(seconds=6.0))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert outcome.seconds < 5.0
    assert outcome.plan is not None and outcome.overhead <= plain.overhead + 1e-3
    verify(outcome.plan, drawn_graph)


@pytest.fixture
def drawn_graph() -> Graph:
    """A chain of sixteen layers and its backward, each value 5 bytes, each op a second."""
    return chain_graph(16)


def test_a_pinned_op_with_ways_for_later_offers_no_moves() -> None:
    """It runs once: its ways for later computations stay unused, and no load may be one of them."""

    def once(reads: tuple[int, ...], writes: tuple[int, ...], use: Use = "any") -> Alternative:
        return Alternative(reads=reads, writes=writes, variants=(Variant(cost_s=1.0),), use=use)

    ways = (
        (once((0,), (1, 2), "first"), once((0, 2), (1,), "again")),  # as a BatchNorm has them
        (once((0,), (3,)),),
        (once((3,), (4,)),),
        (once((4, 2), (5,)), once((4, 0), (5,))),
        (once((5, 1), (6,)), once((5, 0), (6,))),
    )
    sizes = (0, 8, 1, 8, 8, 1, 1)
    graph = Graph(
        values=tuple(
            Value(id=i, name=f"v{i}", size_bytes=n, role="computed" if i else "input")
            for i, n in enumerate(sizes)
        ),
        ops=tuple(
            Op(id=i, target="test", alternatives=own, pinned=None if i else "it counts")
            for i, own in enumerate(ways)
        ),
        segments=(Segment(id=0, phase="forward"),),
    )
    validate_graph(graph)
    task = Task(graph=graph, budget_bytes=working_set_bytes(graph)[0], far=FAST)
    assert not MovesEvaluator(task).gaps.keys() & {1, 2}
    outcome = plan_with("anytime", task, LIMITS)
    assert outcome.plan is not None
    verify(outcome.plan, graph)
