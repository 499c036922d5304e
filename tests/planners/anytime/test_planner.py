"""The default planner: its programs, its alternatives, its limits."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.graphs import training_graphs
from support.optimum import optimal_overhead, small_graphs
from tightfit._core import _engine
from tightfit.graph import Alternative, Choice, Graph, Op, Value, Variant, validate_graph
from tightfit.graph.liveness import budget_of_ratio, eager_peak_bytes
from tightfit.plan import verify
from tightfit.planners.anytime.kcut.complete import complete
from tightfit.planners.anytime.kcut.program import cut_program
from tightfit.planners.anytime.planner import run_anytime
from tightfit.planners.anytime.relaxation import relaxed
from tightfit.planners.base import Limits, Task
from tightfit.planners.engine.build import build_problem
from tightfit.planners.registry import plan_with
from tightfit.planners.solvers import Solution, SolveOptions, solve
from tightfit.progress import SILENT

STEPS = Limits(iterations=200, workers=1)


def graph_of(*ops: tuple[int, tuple[int, ...]], pinned: tuple[int, ...] = ()) -> Graph:
    """Ops that each write one value of the given size and read earlier ones; unit costs."""
    return validate_graph(
        Graph(
            values=tuple(
                Value(id=i, name=f"v{i}", size_bytes=size) for i, (size, _) in enumerate(ops)
            ),
            ops=tuple(
                Op(
                    id=i,
                    target="test",
                    pinned="by the test" if i in pinned else None,
                    alternatives=(
                        Alternative(reads=reads, writes=(i,), variants=(Variant(cost_s=1.0),)),
                    ),
                )
                for i, (_, reads) in enumerate(ops)
            ),
        )
    )


# v0 and v1 are read again at the end; in between v2 and v3 need 4 bytes together.
CHAIN = graph_of((2, ()), (2, (0,)), (2, (1,)), (2, (2,)), (1, (3, 1)), (1, (4, 0)))


def solved(graph: Graph, budget: int, cuts: tuple[int, ...]) -> tuple[float, Solution]:
    problem = build_problem(Task(graph=graph, budget_bytes=budget))
    model = cut_program(relaxed(problem), problem.budget_bytes, cuts)
    answer = solve(model.program, SolveOptions(seconds=10))
    return model.overhead(answer.bound), answer


def test_the_memory_row_forces_a_recomputation() -> None:
    assert solved(CHAIN, 8, (3,))[0] == pytest.approx(0.0, abs=1e-6)
    assert solved(CHAIN, 6, (3,))[0] == pytest.approx(1 / 6, abs=1e-6)


def test_a_recomputation_needs_its_inputs() -> None:
    # of v0 and v1 neither can stay along with v2 and v3, and making v1 again makes v0 again
    assert solved(CHAIN, 5, (3,))[0] == pytest.approx(2 / 6, abs=1e-6)


def test_a_pinned_op_is_not_recomputed() -> None:
    pinned = msgspec.structs.replace(
        CHAIN,
        ops=tuple(msgspec.structs.replace(op, pinned="by the test") for op in CHAIN.ops),
    )
    assert solved(pinned, 6, (3,))[1].status == "infeasible"


def test_residency_at_a_second_cut_comes_from_somewhere() -> None:
    # v0 is dropped at the first cut, so the second cut (which reads it) needs it computed again
    one, _ = solved(CHAIN, 5, (3,))
    two, _ = solved(CHAIN, 5, (3, 5))
    assert two >= one
    assert solved(CHAIN, 6, (2, 3, 5))[0] == pytest.approx(1 / 6, abs=1e-6)


@given(small_graphs(), st.floats(0.2, 1.0), st.data())
@settings(max_examples=50)
def test_every_program_is_a_bound_and_every_completion_a_schedule(
    graph: Graph, share: float, data: st.DataObject
) -> None:
    budget = round(share * eager_peak_bytes(graph))
    cuts = data.draw(st.sets(st.integers(1, len(graph.ops) - 1), min_size=1, max_size=3))
    problem = build_problem(Task(graph=graph, budget_bytes=budget))
    model = cut_program(relaxed(problem), problem.budget_bytes, sorted(cuts))
    answer = solve(model.program, SolveOptions(seconds=10))
    optimum = optimal_overhead(graph, budget)
    bound = math.inf if answer.status == "infeasible" else model.overhead(answer.bound)
    assert bound <= optimum + 1e-6
    if answer.values is not None:
        schedule = _engine.Schedule(problem.engine, problem.budget_bytes)
        complete(model, answer, schedule)
        assert schedule.check() == ""


@given(training_graphs(max_layers=8), st.floats(0.3, 0.9))
@settings(max_examples=15)
def test_alternatives_never_make_it_worse(graph: Graph, ratio: float) -> None:
    task = Task(graph=graph, budget_bytes=budget_of_ratio(graph, ratio))
    replace = msgspec.structs.replace
    defaults = tuple(replace(op, alternatives=op.alternatives[:1]) for op in graph.ops)
    without = replace(task, graph=replace(graph, ops=defaults, choices=()))
    free, default = (run_anytime(each, STEPS, SILENT).outcome for each in (task, without))
    assert free.overhead <= default.overhead + 1e-9
    assert free.bound <= default.overhead + 1e-6


@given(training_graphs(max_layers=8), st.floats(0.3, 0.9))
@settings(max_examples=10)
def test_an_iteration_limit_gives_the_same_plan_again(graph: Graph, ratio: float) -> None:
    task = Task(graph=graph, budget_bytes=budget_of_ratio(graph, ratio))
    first, second = (run_anytime(task, STEPS, SILENT).outcome for _ in range(2))
    assert first.plan == second.plan


def linked_graph() -> Graph:
    """A long chain whose two last ops either both read the large v0 or both the small v1."""
    sizes = (8, 1, 4, 4, 4, 1, 1)
    reads = ((), (0,), (1,), (2,), (3,), (4,), (5,))
    ops = [
        Op(
            id=i,
            target="test",
            alternatives=(
                Alternative(reads=reads[i], writes=(i,), variants=(Variant(cost_s=1.0),)),
            ),
        )
        for i in range(7)
    ]
    for i in (5, 6):
        ways = tuple(
            Alternative(
                name=name,
                reads=(*reads[i], source),
                writes=(i,),
                variants=(Variant(cost_s=1.0 + 0.1 * source),),
            )
            for name, source in (("default", 0), ("small", 1))
        )
        ops[i] = msgspec.structs.replace(ops[i], alternatives=ways)
    choice = Choice(branches=(((5, 0), (6, 0)), ((5, 1), (6, 1))))
    values = tuple(Value(id=i, name=f"v{i}", size_bytes=size) for i, size in enumerate(sizes))
    return validate_graph(Graph(values=values, ops=tuple(ops), choices=(choice,)))


def test_linked_alternatives_are_chosen_together() -> None:
    graph = linked_graph()
    task = Task(graph=graph, budget_bytes=10)
    outcome = plan_with("anytime", task, STEPS)
    assert outcome.plan is not None
    verify(outcome.plan, graph)
    assert outcome.overhead == pytest.approx(0.2 / 7, abs=1e-6)
