"""Plans with moves of small graphs, against exhaustive search."""

from __future__ import annotations

import math

import msgspec
import pytest

from support.optimum_moves import least_time_s, random_graph
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan import Far, simulate, verify
from tightfit.planners.base import Limits, Task
from tightfit.planners.bounds import working_set_bytes
from tightfit.planners.registry import plan_with

LIMITS = Limits(iterations=3000, seconds=60)
CASES = [(seed, ratio, speed) for seed in range(8) for ratio in (0.2, 0.6) for speed in (1.0, 4.0)]


def case(seed: int, ratio: float, speed: float) -> Task:
    graph = random_graph(seed, 6)
    far = Far(capacity_bytes=1 << 20, store_bytes_per_s=speed, load_bytes_per_s=speed)
    least, _ = working_set_bytes(graph)
    budget = least + round(ratio * (eager_peak_bytes(graph) - least))
    return Task(graph=graph, budget_bytes=budget, far=far)


@pytest.fixture(scope="module")
def found() -> dict[tuple[int, float, float], tuple[float, float, float, float]]:
    """Least time, time of the plan with moves and of that without, bound; by case."""
    times = {}
    for seed, ratio, speed in CASES:
        task = case(seed, ratio, speed)
        assert task.far is not None
        least = least_time_s(task.graph, task.budget_bytes, task.far)
        outcome = plan_with("anytime", task, LIMITS)
        plain = plan_with("anytime", msgspec.structs.replace(task, far=None), LIMITS)
        if outcome.plan is not None:
            verify(outcome.plan, task.graph)
            assert simulate(task.graph, outcome.plan).peak_bytes <= task.budget_bytes
        base = sum(op.alternatives[0].variants[0].cost_s for op in task.graph.ops)
        times[seed, ratio, speed] = (
            least,
            base * (1 + outcome.overhead),
            base * (1 + plain.overhead),
            base * (1 + outcome.bound),
        )
    return times


@pytest.mark.parametrize("key", CASES)
def test_no_plan_beats_the_optimum_and_no_bound_exceeds_it(key, found) -> None:
    least, time_s, plain_s, bound_s = found[key]
    assert time_s >= least - 1e-9
    assert bound_s <= least + 1e-6
    assert time_s <= plain_s + 1e-9


def test_nearly_all_plans_are_optimal(found) -> None:
    feasible = [times for times in found.values() if times[0] < math.inf]
    optimal = [times for times in feasible if times[1] <= times[0] + 1e-9]
    moving = [times for times in feasible if times[1] < times[2] - 1e-9]
    assert len(feasible) >= 20
    assert len(moving) >= 10
    assert len(optimal) >= 0.9 * len(feasible)
