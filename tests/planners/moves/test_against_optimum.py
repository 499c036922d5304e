"""Plans with moves of small graphs, against exhaustive search."""

from __future__ import annotations

import math

import msgspec

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


def test_nearly_all_plans_are_optimal_and_no_bound_exceeds_the_optimum() -> None:
    feasible = moving = optimal = 0
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
        time_s, plain_s, bound_s = (
            base * (1 + overhead) for overhead in (outcome.overhead, plain.overhead, outcome.bound)
        )
        assert time_s >= least - 1e-9, (seed, ratio, speed)
        assert bound_s <= least + 1e-6, (seed, ratio, speed)
        assert time_s <= plain_s + 1e-9, (seed, ratio, speed)
        if least < math.inf:
            feasible += 1
            moving += time_s < plain_s - 1e-9
            optimal += time_s <= least + 1e-9
    assert feasible >= 20
    assert moving >= 10
    assert optimal >= 0.9 * feasible
