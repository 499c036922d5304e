"""Orders of a step that recomputes nothing, against every order of small graphs."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.graphs import training_graphs
from support.optimum import small_graphs
from support.orders import least_peak_of_any_order
from tightfit.graph import Alternative, Graph, Op, Segment, Value, Variant, validate_graph
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan.assemble import assemble, keep_everything
from tightfit.plan.plan import Compute
from tightfit.plan.simulate import simulate
from tightfit.plan.verify import verify
from tightfit.planners.base import Limits, Task
from tightfit.planners.orders.least_peak import least_peak
from tightfit.planners.registry import plan_with


def in_order(graph: Graph, order: tuple[int, ...]) -> list[Compute]:
    """What runs if nothing is recomputed, in another order."""
    return sorted(keep_everything(graph), key=lambda step: order.index(step.op))


def one_value_each(
    sizes: tuple[int, ...], reads: tuple[tuple[int, ...], ...], workspaces: tuple[int, ...]
) -> Graph:
    """A step whose ops make one value each, in a second."""
    variants = [(Variant(cost_s=1.0, workspace_bytes=n),) for n in workspaces]
    ways = [
        Alternative(reads=own, writes=(i,), variants=variants[i]) for i, own in enumerate(reads)
    ]
    return Graph(
        values=tuple(Value(id=i, name=f"v{i}", size_bytes=size) for i, size in enumerate(sizes)),
        ops=tuple(Op(id=i, target="test", alternatives=(way,)) for i, way in enumerate(ways)),
    )


def two_pairs() -> Graph:
    """Two large values, each with an op that reads it: one pair must end before the other begins.

    Each order with the pairs mixed needs more, so that single moves do not lead from one to the
    other.
    """
    graph = one_value_each(
        sizes=(1, 0, 0, 0, 2, 2, 0, 0),
        reads=((), (0,), (0,), (0,), (0,), (0,), (1, 2, 4), (5,)),
        workspaces=(0, 0, 0, 0, 0, 0, 1, 0),
    )
    ops = tuple(
        msgspec.structs.replace(
            op, segment=int(op.id > 3), pinned=None if op.id in (4, 6) else "drawn"
        )
        for op in graph.ops
    )
    segments = Segment(id=0, phase="forward"), Segment(id=1, phase="backward")
    return msgspec.structs.replace(graph, ops=ops, segments=segments)


@given(small_graphs(max_ops=8))
@example(two_pairs())
@settings(max_examples=100)
def test_the_least_peak_of_small_graphs_is_found(graph: Graph) -> None:
    task = Task(graph=graph, budget_bytes=0)
    least = least_peak_of_any_order(graph)
    found = least_peak(task, enough_bytes=least)
    assert found.floor_bytes <= least == found.peak_bytes
    assert found.traced_peak_bytes == eager_peak_bytes(graph)
    assert sorted(found.ops) == list(range(len(graph.ops)))


@given(training_graphs(max_layers=8), st.sampled_from(["fresh", "accumulated"]))
@settings(max_examples=100)
def test_the_peak_of_an_order_is_that_of_its_plan(
    graph: Graph, gradients: Literal["fresh", "accumulated"]
) -> None:
    found = least_peak(Task(graph=graph, budget_bytes=0, gradients=gradients))
    computes = in_order(graph, found.ops)
    plan = assemble(graph, computes, budget_bytes=found.peak_bytes, gradients=gradients)
    verify(plan, graph)
    assert found.floor_bytes <= simulate(graph, plan).peak_bytes <= found.peak_bytes
    assert found.peak_bytes <= found.traced_peak_bytes
    draws = [op for op in found.ops if graph.ops[op].random_state_bytes]
    assert draws == sorted(draws)


def branches(device: str = "cpu") -> Graph:
    """Two branches of a large value that becomes a small one; traced side by side."""
    graph = one_value_each(
        sizes=(1, 9, 9, 1, 1, 1), reads=((), (0,), (0,), (1,), (2,), (3, 4)), workspaces=(0,) * 6
    )
    return validate_graph(
        msgspec.structs.replace(graph, device=msgspec.structs.replace(graph.device, kind=device))
    )


def test_branches_run_one_after_the_other() -> None:
    found = least_peak(Task(graph=branches(), budget_bytes=0))
    assert (found.traced_peak_bytes, found.peak_bytes, found.floor_bytes) == (19, 11, 10)
    assert found.ops.index(3) < found.ops.index(2) or found.ops.index(4) < found.ops.index(1)


def test_a_forward_pass_on_cuda_keeps_its_order() -> None:
    found = least_peak(Task(graph=branches("cuda"), budget_bytes=0))
    assert found.ops == (0, 1, 2, 3, 4, 5)


def kept_early() -> Graph:
    """A large value that is kept to the end, traced before one that soon becomes small."""
    values = (
        Value(id=0, name="kept", size_bytes=9, fate="returned"),
        Value(id=1, name="large", size_bytes=9),
        Value(id=2, name="small", size_bytes=1, fate="returned"),
    )
    slow, fast = Variant(cost_s=2.0), Variant(cost_s=1.0)
    makes = [Alternative(reads=(), writes=(v,), variants=(slow,)) for v in range(2)]
    ways = [
        Alternative(name=name, reads=(1,), writes=(2,), variants=(one,))
        for name, one in (("default", slow), ("faster", fast))
    ]
    ops = (
        Op(id=0, target="test", alternatives=(makes[0],)),
        Op(id=1, target="test", alternatives=(makes[1],)),
        Op(id=2, target="test", alternatives=tuple(ways)),
    )
    return validate_graph(Graph(values=values, ops=ops))


def test_what_one_order_has_no_room_for_another_may_have() -> None:
    """Also where alternatives leave something to search for."""
    task = Task(graph=kept_early(), budget_bytes=12)
    outcome = plan_with("anytime", task, Limits(seconds=1.0))
    assert outcome.plan is not None and outcome.peak_bytes <= 12
    assert outcome.bound <= outcome.overhead <= 0


def test_the_default_planner_reorders_before_it_recomputes() -> None:
    task = Task(graph=branches(), budget_bytes=11)
    outcome = plan_with("anytime", task, Limits(seconds=1))
    assert (outcome.overhead, outcome.bound, outcome.status) == (0.0, 0.0, "optimal")
    assert outcome.peak_bytes == 11
    assert "order only" in outcome.note


@pytest.mark.parametrize("seed", range(3))
def test_without_a_time_limit_the_order_depends_on_the_seed_only(seed: int) -> None:
    task = Task(graph=branches(), budget_bytes=0)
    assert least_peak(task, seed=seed) == least_peak(task, seed=seed)
