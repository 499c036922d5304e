"""Policies over a static graph: which value goes, and that chains of recomputation are followed."""

from __future__ import annotations

from support.papers import chain, graph_of, op
from tightfit.graph.ir import Value
from tightfit.plan.plan import Compute
from tightfit.planners.base import Limits, Task
from tightfit.planners.registry import plan_with


def computed(policy: str, task: Task) -> list[int]:
    outcome = plan_with(f"eviction:{policy}", task, Limits(seconds=10))
    assert outcome.plan is not None, outcome.note
    return [step.op for step in outcome.plan.instructions if isinstance(step, Compute)]


def test_the_policy_decides_which_value_is_computed_again() -> None:
    """A large cheap value and a small stale one; one of them has to go before op 3."""
    sizes = [2, 4, 1, 2, 0, 0]
    values = [Value(id=i, name=f"v{i}", size_bytes=size) for i, size in enumerate(sizes)]
    ops = [
        op(0, [], [0], cost=3),
        op(1, [], [1], cost=4),
        op(2, [], [2]),
        op(3, [2], [3], segment=1),
        op(4, [1, 3], [4], segment=1),
        op(5, [0], [5], segment=1),
    ]
    task = Task(graph=graph_of(values, ops), budget_bytes=8)
    assert computed("size", task) == [0, 1, 2, 3, 1, 4, 5]
    assert computed("lru", task) == [0, 1, 2, 3, 4, 0, 5]


def test_a_missing_input_is_computed_again_with_what_it_misses() -> None:
    task = Task(graph=chain([2, 2, 4, 1]), budget_bytes=9)
    order = computed("lru", task)
    assert order[:4] == [0, 1, 2, 3]
    assert len(order) > 8
    assert order.index(7) == len(order) - 1


def test_a_run_without_room_says_where() -> None:
    sizes = [4, 4, 4, 0]
    values = [Value(id=i, name=f"v{i}", size_bytes=size) for i, size in enumerate(sizes)]
    ops = [
        op(0, [], [0], pinned="random"),
        op(1, [], [1], pinned="random"),
        op(2, [], [2]),
        op(3, [0, 1], [3], segment=1),
    ]
    task = Task(graph=graph_of(values, ops), budget_bytes=10)
    outcome = plan_with("eviction", task, Limits(seconds=5))
    assert (outcome.plan, outcome.status) == (None, "unknown")
    assert outcome.note == "no value is left to evict before op 2"
