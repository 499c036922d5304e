"""Each constraint family of Checkmate and MONeT decides the optimum of some 3-5 node graph."""

from __future__ import annotations

import math

import msgspec
import pytest

from support.papers import chain, graph_of, op
from tightfit.graph.ir import Graph, Value
from tightfit.plan.plan import Compute
from tightfit.planners.base import Task
from tightfit.planners.papers.checkmate import constraints as checkmate_families
from tightfit.planners.papers.checkmate.program import build_program
from tightfit.planners.papers.checkmate.variables import Variables as CheckmateVariables
from tightfit.planners.papers.checkmate.variables import frontier_stages, split_stages
from tightfit.planners.papers.monet import constraints as monet_families
from tightfit.planners.papers.monet.implementations import Implementations, single_implementations
from tightfit.planners.papers.monet.program import MonetProgram
from tightfit.planners.papers.monet.program import build_program as build_monet
from tightfit.planners.papers.monet.variables import Variables as MonetVariables
from tightfit.planners.papers.stages.schedule import forced_residency, recompute
from tightfit.planners.papers.stages.staged import Implementation, staged
from tightfit.planners.solvers import ProgramBuilder, SolveOptions, solve, solve_by_rows

SECONDS = SolveOptions(seconds=20)


def value(number: int, size: int, fate: str = "none") -> Value:
    return Value(id=number, name=f"v{number}", size_bytes=size, fate=fate)


def sizes(*given: int) -> list[Value]:
    return [value(number, size) for number, size in enumerate(given)]


CHAIN = chain([2, 4, 1])
WORKSPACE = graph_of(
    sizes(4, 1, 1, 1),
    [
        op(0, [], [0]),
        op(1, [0], [1]),
        op(2, [1], [2], segment=1, workspace=3),
        op(3, [0, 2], [3], segment=1),
    ],
)
OUTSIDE = graph_of(
    sizes(4, 1, 1, 1),
    [
        op(0, [], [0]),
        op(1, [0], [1]),
        op(2, [1], [2], segment=1),
        op(3, [0, 2], [3], segment=1),
    ],
    outside=3,
)
RETURNED_TWIN = graph_of(
    [value(0, 4), value(1, 2, "returned"), value(2, 1), value(3, 5), value(4, 1)],
    [
        op(0, [], [0, 1]),
        op(1, [0], [2]),
        op(2, [2], [3], segment=1),
        op(3, [0], [4], segment=1),
    ],
)
SPRINGING_UP = graph_of(
    sizes(4, 1, 1, 1),
    [
        op(0, [], [0]),
        op(1, [], [1]),
        op(2, [1], [2], segment=1, workspace=3),
        op(3, [0, 2], [3], segment=1),
    ],
)
FORWARD_PEAK = graph_of(
    sizes(4, 4, 4),
    [op(0, [], [0]), op(1, [], [1], workspace=2), op(2, [0], [2], segment=1)],
)
DEEP = graph_of(
    sizes(4, 4, 4, 4, 4),
    [
        op(0, [], [0]),
        op(1, [0], [1]),
        op(2, [], [2], pinned="random"),
        op(3, [], [3], segment=1, workspace=2),
        op(4, [1], [4], segment=1),
    ],
)
CROWDED = graph_of(
    sizes(4, 4, 4, 5, 4, 0),
    [
        op(0, [], [0, 1]),
        op(1, [0], [2, 3], pinned="random"),
        op(2, [], [4]),
        op(3, [4, 2, 1], [5], segment=1),
    ],
)


def checkmate_overhead(graph: Graph, budget: int, without: str = "") -> float:
    problem = staged(Task(graph=graph, budget_bytes=budget))
    builder = ProgramBuilder()
    variables = CheckmateVariables(problem, frontier_stages(problem), builder)
    for family in checkmate_families.FAMILIES:
        if family.__name__ != without:
            family(variables)
    return solve(builder.build(), SECONDS).objective / 100 - 1


@pytest.mark.parametrize(
    ("family", "graph", "budget", "exact", "relaxed"),
    [
        ("inputs_are_there", CHAIN, 9, 1 / 6, 0.0),
        ("residency_has_a_source", SPRINGING_UP, 6, 0.25, 0.0),
        ("used_memory", CHAIN, 9, 1 / 6, 0.0),
        ("workspace", WORKSPACE, 6, 0.25, 0.0),
        ("free_only_if_safe", CHAIN, 9, 1 / 6, 0.0),
        ("boundary_memory", OUTSIDE, 6, 0.25, 0.0),
    ],
)
def test_every_family_of_checkmate_decides(
    family: str, graph: Graph, budget: int, exact: float, relaxed: float
) -> None:
    assert checkmate_overhead(graph, budget) == pytest.approx(exact)
    assert checkmate_overhead(graph, budget, without=family) == pytest.approx(relaxed)


def test_a_second_instance_counts_only_while_its_node_runs() -> None:
    assert checkmate_overhead(RETURNED_TWIN, 8) == pytest.approx(0.25)
    assert checkmate_overhead(RETURNED_TWIN, 8, without="free_only_if_safe") == pytest.approx(0.0)


def test_what_can_be_freed_is_freed() -> None:
    """Equation 6b never decides the optimum (section 4.6), but it fixes FREE."""
    problem = staged(Task(graph=CHAIN, budget_bytes=20))
    model = build_program(problem, frontier_stages(problem))
    schedule = model.start(recompute(problem, [0] * 7))
    least = {}
    for families in (checkmate_families.FAMILIES, [checkmate_families.free_only_if_safe]):
        builder = ProgramBuilder()
        variables = CheckmateVariables(problem, frontier_stages(problem), builder)
        for family in families:
            family(variables)
        program = builder.build()
        fixed = [*variables.computed.values(), *variables.resident.values()]
        program.lower[fixed] = program.upper[fixed] = schedule[fixed]
        program.costs[:] = 0
        program.costs[list(variables.freed.values())] = 1
        least[len(families)] = solve(program, SECONDS).objective
    assert least[1] == 0
    assert (
        least[len(checkmate_families.FAMILIES)]
        == schedule[list(model.variables.freed.values())].sum()
        > 0
    )


def test_a_schedule_is_a_feasible_start_with_its_own_cost() -> None:
    problem = staged(Task(graph=CHAIN, budget_bytes=9))
    model = build_program(problem, frontier_stages(problem))
    computes = recompute(problem, [0] * 7)
    values = model.start(computes)
    rows = model.program
    for row in range(rows.rows):
        terms = slice(rows.starts[row], rows.starts[row + 1])
        total = rows.coefficients[terms] @ values[rows.indices[terms]]
        if rows.indices[terms].size and max(values) <= 1000:
            assert rows.row_lower[row] - 1e-9 <= total <= rows.row_upper[row] + 1e-9
    assert model.computes(values) == computes


def test_split_stages_allow_a_second_recomputation_before_the_same_op() -> None:
    problem = staged(Task(graph=CHAIN, budget_bytes=9))
    stages = split_stages(problem)
    assert sum(stage.first is None for stage in stages) == 3
    overhead = solve(build_program(problem, stages).program, SECONDS).objective / 100 - 1
    assert overhead == pytest.approx(1 / 6)


def monet_overhead(graph: Graph, budget: int, without: str = "") -> float:
    problem = staged(Task(graph=graph, budget_bytes=budget))
    builder = ProgramBuilder()
    variables = MonetVariables(problem, single_implementations(problem), builder)
    for family in monet_families.FAMILIES:
        if family.__name__ != without:
            family(variables)
        elif family is monet_families.saved_memory:
            _unbounded_sums(variables, builder)
    return solve(builder.build(), SECONDS).objective / 100 - 1


def _unbounded_sums(variables: MonetVariables, builder: ProgramBuilder) -> None:
    for stage in range(1, variables.backward + 1):
        for node in range(variables.forward + 1):
            variables.held[stage, node] = builder.real(lower=0, upper=1000)


@pytest.mark.parametrize(
    ("family", "graph", "budget", "exact", "relaxed"),
    [
        ("forward_memory", FORWARD_PEAK, 8, 1 / 3, 0.0),
        ("saved_memory", CHAIN, 9, 1 / 6, 0.0),
        ("recomputation_memory", CROWDED, 13, 0.5, 0.25),
        ("backward_memory", CHAIN, 9, 1 / 6, 0.0),
        ("recomputed_inputs", DEEP, 8, 0.4, 0.2),
        ("saved_has_a_source", OUTSIDE, 6, 0.25, 0.0),
        ("backward_inputs", CHAIN, 9, 1 / 6, 0.0),
        ("boundary_memory", OUTSIDE, 6, 0.25, 0.0),
    ],
)
def test_every_family_of_monet_decides(
    family: str, graph: Graph, budget: int, exact: float, relaxed: float
) -> None:
    assert monet_overhead(graph, budget) == pytest.approx(exact)
    assert monet_overhead(graph, budget, without=family) == pytest.approx(relaxed)


def test_exactly_one_implementation_is_chosen_and_priced() -> None:
    """The second backward op may read the small output instead of the large input, for more."""
    problem = staged(Task(graph=WORKSPACE, budget_bytes=6))
    reads_input = problem.nodes[3].first
    reads_output = Implementation(
        compute=Compute(3, 0, 0),
        reads=(2,),
        writes=reads_input.writes,
        cost_s=reads_input.cost_s * 1.5,
        workspace_bytes=0,
    )
    one = single_implementations(problem)
    both = Implementations(first=(*one.first[:3], (reads_input, reads_output)), again=one.again)
    model = build_monet(problem, both)
    answer = solve(model.program, SECONDS)
    assert answer.objective / 100 - 1 == pytest.approx(0.125)
    chosen = [round(answer.values[column]) for column in model.variables.chosen.values()]
    assert chosen == [0, 1]


def overwritable(budget: int, *, workspace: int, last_reads: tuple[int, ...]) -> Task:
    """Values 0 and 1 have to make room in the backward pass; op 1 may write over value 0."""
    ops = [
        op(0, [], [0]),
        op(1, [0], [1], workspace=workspace),
        op(2, [], [2], segment=1, workspace=budget - 4),
        op(3, [1, 2], [3], segment=1),
        op(4, last_reads, [4], segment=1),
    ]
    return Task(graph=graph_of(sizes(4, 4, 1, 1, 1), ops), budget_bytes=budget)


def in_place_overhead(task: Task, without: str = "", ways: int = 2) -> float:
    problem = staged(task)
    plain = problem.nodes[1].again
    assert plain is not None
    in_place = msgspec.structs.replace(plain, compute=Compute(1, 1, 0), overwrites=0)
    one = single_implementations(problem)
    first = (*one.first[:1], (plain, in_place), *one.first[2:])
    again = (*one.again[:1], (plain, in_place), *one.again[2:])
    builder = ProgramBuilder()
    variables = MonetVariables(
        problem, one if ways == 1 else Implementations(first=first, again=again), builder
    )
    for family in monet_families.FAMILIES:
        if family.__name__ != without:
            family(variables)
    model = MonetProgram(variables=variables, program=builder.build())
    answer = solve_by_rows(model.program, SECONDS, model.settled)
    return answer.objective / 100 - 1


MAKE_ROOM = overwritable(7, workspace=0, last_reads=(3,))
NEED_BOTH = overwritable(10, workspace=3, last_reads=(0, 3))


def test_writing_over_the_input_makes_room() -> None:
    """Out of place the two values need 8 bytes at once."""
    assert in_place_overhead(MAKE_ROOM, ways=1) == math.inf
    assert in_place_overhead(MAKE_ROOM) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("family", "task", "exact", "relaxed"),
    [
        ("overwritten_is_gone", NEED_BOTH, 0.6, 0.4),
        ("remaining_was_made", MAKE_ROOM, 0.4, 0.2),
    ],
)
def test_every_family_of_in_place_implementations_decides(
    family: str, task: Task, exact: float, relaxed: float
) -> None:
    assert in_place_overhead(task) == pytest.approx(exact)
    assert in_place_overhead(task, without=family) == pytest.approx(relaxed)


def test_a_program_with_a_forward_op_after_a_backward_op_is_refused() -> None:
    graph = chain([1, 1])
    problem = staged(Task(graph=graph, budget_bytes=5))
    nodes = (*problem.nodes[2:], *problem.nodes[:2])
    backwards = msgspec.structs.replace(problem, nodes=nodes)
    with pytest.raises(ValueError, match="forward op follows a backward op"):
        build_monet(backwards, single_implementations(problem))


def test_keeping_everything_is_a_schedule_without_recomputation() -> None:
    problem = staged(Task(graph=CHAIN, budget_bytes=20))
    residency = forced_residency(problem)
    for number, node in enumerate(problem.nodes):
        for value in node.first.reads:
            for stage in range(problem.values[value].begins, number + 1):
                residency[stage] |= 1 << value
    computes = recompute(problem, residency)
    assert [compute.op for compute in computes] == [0, 1, 2, 3, 4, 5]
