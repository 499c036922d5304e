"""The engine's incremental state equals a fresh computation; its peak and cost are the plan's."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from support.graphs import training_graphs
from tightfit._core import _engine
from tightfit.graph import Alternative, Graph, Op, Value, Variant, validate_graph
from tightfit.graph.fingerprint import fingerprint
from tightfit.plan import Plan, assemble, keep_everything, simulate, verify
from tightfit.planners.base import Task
from tightfit.planners.engine.build import build_problem
from tightfit.planners.engine.problem import EngineProblem, computes_of

LARGE = 1 << 40


def move(schedule: _engine.Schedule, problem: EngineProblem, random_: random.Random) -> None:
    """Make one random change."""
    stage = random_.randrange(schedule.stages)
    kind = random_.randrange(3)
    if kind == 0:
        schedule.drop(random_.randrange(problem.engine.value_count), stage)
    elif kind == 1:
        computed = schedule.computed(stage)
        if computed:
            schedule.retain(random_.choice(computed), stage)
    else:
        op = random_.randrange(schedule.stages)
        ways = problem.engine.first_alternatives(op)
        schedule.select(op, random_.choice(ways), -1, random_.random() < 0.5)


def wander(schedule: _engine.Schedule, problem: EngineProblem, seed: int, moves: int) -> None:
    """Make random moves, undoing some of them, in transactions of random length."""
    random_ = random.Random(seed)
    for _ in range(moves):
        mark = schedule.mark()
        move(schedule, problem, random_)
        if random_.random() < 0.4:
            schedule.undo_to(mark if random_.random() < 0.7 else 0)
        if random_.random() < 0.1:
            schedule.commit()
    schedule.commit()


def problem_of(graph: Graph, budget_bytes: int = LARGE) -> EngineProblem:
    return build_problem(Task(graph=graph, budget_bytes=budget_bytes))


@given(training_graphs(), st.integers(0, 60), st.integers(0, 2**32))
def test_incremental_state_equals_recomputed_state(graph: Graph, budget: int, seed: int) -> None:
    problem = problem_of(graph, graph.constant_bytes + budget)
    schedule = _engine.Schedule(problem.engine, problem.budget_bytes)
    assert schedule.check() == ""
    wander(schedule, problem, seed, 60)
    assert schedule.check() == ""


@given(training_graphs(max_layers=12))
@settings(max_examples=3)
def test_incremental_state_survives_ten_thousand_moves(graph: Graph) -> None:
    problem = problem_of(graph, graph.constant_bytes + 30)
    schedule = _engine.Schedule(problem.engine, problem.budget_bytes)
    wander(schedule, problem, 7, 10_000)
    assert schedule.check() == ""


@given(training_graphs(), st.sampled_from(["fresh", "accumulated"]))
def test_the_start_keeps_everything(graph: Graph, gradients: str) -> None:
    task = Task(graph=graph, budget_bytes=LARGE, gradients=gradients)
    problem = build_problem(task, alternatives=False)
    schedule = _engine.Schedule(problem.engine, problem.budget_bytes)
    computes = computes_of(problem, schedule.computes())
    assert [c.op for c in computes] == [c.op for c in keep_everything(graph)]
    assert problem.overhead(schedule.cost) < 1e-9


@given(
    training_graphs(),
    st.integers(0, 60),
    st.integers(0, 2**32),
    st.sampled_from(["fresh", "accumulated"]),
)
def test_peak_and_cost_are_those_of_the_plan(
    graph: Graph, budget: int, seed: int, gradients: str
) -> None:
    task = Task(graph=graph, budget_bytes=graph.constant_bytes + budget, gradients=gradients)
    problem = build_problem(task)
    schedule = _engine.Schedule(problem.engine, problem.budget_bytes)
    wander(schedule, problem, seed, 30)
    plan = assemble(
        graph, computes_of(problem, schedule.computes()), budget_bytes=LARGE, gradients=gradients
    )
    verify_all_but_choices(plan, graph)
    result = simulate(graph, plan)
    assert result.peak_bytes == graph.constant_bytes + schedule.peak()
    assert abs(result.overhead - problem.overhead(schedule.cost)) < 1e-9


def verify_all_but_choices(plan: Plan, graph: Graph) -> None:
    """Random moves select alternatives one by one, so linked ones may disagree."""
    loose = msgspec.structs.replace(graph, choices=())
    verify(msgspec.structs.replace(plan, graph=fingerprint(loose)), loose)


@given(training_graphs(), st.integers(0, 2**32))
def test_a_snapshot_loads_to_the_same_schedule(graph: Graph, seed: int) -> None:
    problem = problem_of(graph, graph.constant_bytes + 30)
    schedule = _engine.Schedule(problem.engine, problem.budget_bytes)
    wander(schedule, problem, seed, 30)
    other = _engine.Schedule(problem.engine, problem.budget_bytes)
    other.load(schedule.ranges(), schedule.first_choices(), schedule.again_choices())
    assert other.check() == ""
    assert (other.cost, other.peak()) == (schedule.cost, schedule.peak())


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_any_residency_settles_where_an_op_overwrites_what_nothing_makes_again(
    ranges: list[tuple[int, int, int]],
) -> None:
    problem = _engine.Problem()
    for op in range(5):
        problem.add_value(4, op, -1, False)
        problem.add_op(True, False, 0, 0)
        reads = [op - 1] if op else []
        problem.add_alternative(op, reads, [op], True, op in (2, 4))
        overwritten = op - 1 if op in (1, 3) else -1
        problem.add_option(op, 0, 1, 0, overwritten, 0, 0)
    problem.finish()
    schedule = _engine.Schedule(problem, LARGE)
    schedule.load_ranges(ranges)
    assert schedule.check() == ""


def test_what_runs_again_takes_the_way_whose_reads_are_there() -> None:
    """Both ways cost the same, but one reads what is gone."""

    def op(number: int, *reads: int, again: tuple[int, ...] = ()) -> Op:
        ways = [Alternative(reads=reads, writes=(number,), variants=(Variant(cost_s=1.0),))]
        if again:
            ways.append(msgspec.structs.replace(ways[0], name="at once", reads=again, use="again"))
        return Op(id=number, target="test", alternatives=tuple(ways))

    values = tuple(Value(id=i, name=f"v{i}", size_bytes=1) for i in range(6))
    ops = (op(0), op(1, 0), op(2, 1, again=(0,)), op(3, 2), op(4, 3), op(5, 4, 2, 0))
    problem = problem_of(validate_graph(Graph(values=values, ops=ops)))
    schedule = _engine.Schedule(problem.engine, problem.budget_bytes)
    schedule.drop(2, 4)
    assert [(c.op, c.alternative) for c in computes_of(problem, schedule.computes())[-2:]] == [
        (2, 1),
        (5, 0),
    ]
