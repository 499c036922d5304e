"""The baselines: where they put checkpoints and how often they compute."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest

from support.papers import chain, graph_of, op, peak_bytes
from tightfit.graph.ir import Alternative, Graph, Op, Value
from tightfit.planners.base import Limits, Task
from tightfit.planners.papers.checkpoints import (
    articulation_points,
    checkpoint_schedule,
    forward_nodes,
)
from tightfit.planners.papers.chen import greedy_segments, sqrt_segments
from tightfit.planners.papers.gist import gist_schedule
from tightfit.planners.papers.griewank import (
    forward_steps,
    held_checkpoints,
    revolve_schedule,
)
from tightfit.planners.papers.stages.staged import Staged, staged
from tightfit.planners.registry import is_chain, plan_with


def problem_of(graph: Graph) -> Staged:
    return staged(Task(graph=graph, budget_bytes=10**6))


@cache
def fewest_steps(length: int, places: int) -> int:
    """The recursion that revolve solves in closed form."""
    if length <= 1:
        return 0
    if places == 0:
        return length * (length - 1) // 2
    return min(
        m + fewest_steps(length - m, places - 1) + fewest_steps(m, places) for m in range(1, length)
    )


def test_the_closed_form_of_revolve_is_the_optimum_of_its_recursion() -> None:
    for length in range(1, 24):
        for places in range(6):
            assert forward_steps(length, places) == fewest_steps(length, places)


@pytest.mark.parametrize("places", [0, 1, 2, 3])
def test_revolve_computes_as_often_as_its_theorem_says(places: int) -> None:
    """Backward of step i needs result i - 1, so l steps advance as if the last were free."""
    length = 9
    values = [Value(id=i, name=f"x{i}", size_bytes=1) for i in range(2 * length)]
    ops = [op(i, [i - 1] if i else [], [i]) for i in range(length)]
    for step in range(length):
        node = length - 1 - step
        reads = [*([node - 1] if node else []), *([length + step - 1] if step else [])]
        ops.append(op(length + step, reads, [length + step], segment=1))
    problem = problem_of(graph_of(values, ops))
    computes = revolve_schedule(problem, places)
    forward = sum(compute.op < length for compute in computes)
    assert forward <= 1 + forward_steps(length, places)
    assert max(map(len, held_checkpoints(length, places))) <= places


def test_articulation_points_are_the_ends_of_a_residual_block() -> None:
    """0 -> 1 -> 2 -> 3 -> 4 with a skip from 1 to 3: without 1 or 3 the graph falls apart."""
    values = [Value(id=i, name=f"v{i}", size_bytes=1) for i in range(6)]
    ops = [
        op(0, [], [0]),
        op(1, [0], [1]),
        op(2, [1], [2]),
        op(3, [1, 2], [3]),
        op(4, [3], [4]),
        op(5, [0, 2, 4], [5], segment=1),
    ]
    assert articulation_points(problem_of(graph_of(values, ops))) == [1, 3]


def test_segments_end_at_every_root_and_where_enough_bytes_have_gathered() -> None:
    problem = problem_of(chain([4, 1, 1, 4, 2, 2, 1, 1, 4]))
    assert sqrt_segments(forward_nodes(problem)) == [2, 5, 8]
    assert greedy_segments(problem, forward_nodes(problem), 5) == [2, 4, 8]
    assert greedy_segments(problem, [1, 6], 5) == [6]


def test_a_checkpoint_is_kept_and_the_rest_computed_again_once() -> None:
    problem = problem_of(chain([1] * 6))
    order = [compute.op for compute in checkpoint_schedule(problem, {2})]
    assert order == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 10, 11]


def test_a_step_counter_is_no_part_of_a_chain() -> None:
    values = [
        Value(id=0, name="counter", size_bytes=8, role="buffer"),
        Value(id=1, name="counted", size_bytes=8, fate="written_back", replaces=0),
        *(Value(id=i, name=f"v{i}", size_bytes=4) for i in range(2, 5)),
    ]
    ops = [op(0, [], [2]), op(1, [0], [1]), op(2, [2], [3]), op(3, [2, 3], [4], segment=1)]
    graph = graph_of(values, ops)
    assert is_chain(graph)
    assert forward_nodes(problem_of(graph)) == [0, 2]
    least = peak_bytes(graph)
    outcome = plan_with("griewank", Task(graph=graph, budget_bytes=least), Limits(seconds=5))
    assert outcome.overhead == 0.0


def test_revolve_takes_a_step_whose_forward_is_a_counter() -> None:
    values = [
        Value(id=0, name="counter", size_bytes=8, role="buffer"),
        Value(id=1, name="counted", size_bytes=8, fate="written_back", replaces=0),
        Value(id=2, name="tangent", size_bytes=4, role="tangent", segment=1),
        Value(id=3, name="gradient", size_bytes=4, fate="gradient"),
    ]
    graph = graph_of(values, [op(0, [0], [1]), op(1, [2], [3], segment=1)])
    task = Task(graph=graph, budget_bytes=peak_bytes(graph))
    assert plan_with("griewank", task, Limits(seconds=5)).overhead == 0.0


def test_gist_keeps_halves_until_the_backward_and_runs_a_relu_in_place() -> None:
    """0 makes x, 1 is a ReLU over it, 2 halves of that, 3 reads it, 4 widens them for 5."""
    sizes = [8, 8, 4, 8, 8, 8]
    values = [Value(id=i, name=f"v{i}", size_bytes=size) for i, size in enumerate(sizes)]
    over = Alternative(name="aten.relu.over", reads=(0,), writes=(1,), overwrites=0)
    read = Alternative(name="from_half.x", reads=(3, 4), writes=(5,), exactness="lossy")
    ops = [
        op(0, [], [0]),
        msgspec.structs.replace(with_way(op(1, [0], [1]), over), target="aten.relu"),
        msgspec.structs.replace(op(2, [1], [2]), required=False),
        op(3, [1], [3]),
        msgspec.structs.replace(op(4, [2], [4], segment=1), required=False),
        with_way(op(5, [1, 3], [5], segment=1), read),
    ]
    graph = graph_of(values, ops)
    chosen = [(step.op, step.alternative) for step in gist_schedule(graph)]
    assert chosen == [(0, 0), (1, 1), (2, 0), (3, 0), (4, 0), (5, 1)]
    outcome = plan_with("gist", Task(graph=graph, budget_bytes=28), Limits())
    assert outcome.peak_bytes == 24  # what 3 made, the wide one, the result


def with_way(op: Op, way: Alternative) -> Op:
    return msgspec.structs.replace(op, alternatives=(*op.alternatives, way))
