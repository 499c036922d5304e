"""The largest batch of a step whose sizes grow with it, without a model."""

from __future__ import annotations

import pytest

from support.papers import chain
from tightfit.errors import InfeasibleBudget
from tightfit.graph import Graph
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan import verify
from tightfit.planners.base import Limits, Task
from tightfit.planners.questions.batch import proven_batch
from tightfit.planners.questions.request import PlanRequest
from tightfit.planners.registry import plan_with

QUICK = Limits(seconds=5)


def step(batch: int) -> Graph:
    return chain([2 * batch, 4 * batch, batch, 3 * batch])


def fits(batch: int, budget_bytes: int) -> bool:
    return plan_with("anytime", Task(graph=step(batch), budget_bytes=budget_bytes)).plan is not None


@pytest.mark.parametrize("budget_bytes", [40, 200, 1001])
def test_the_next_batch_has_no_plan_and_few_steps_are_captured(budget_bytes: int) -> None:
    captured: list[int] = []

    def capture(batch: int) -> Graph:
        captured.append(batch)
        return step(batch)

    found = proven_batch(capture, PlanRequest(budget_bytes, limits=QUICK))
    assert fits(found.batch, budget_bytes) and not fits(found.batch + 1, budget_bytes)
    assert found.too_large == found.batch + 1
    assert sorted(captured) == sorted({4, 8, found.batch})
    assert found.outcome.plan is not None
    verify(found.outcome.plan, found.graph)
    assert eager_peak_bytes(step(found.without_plan)) <= budget_bytes
    assert eager_peak_bytes(step(found.without_plan + 1)) > budget_bytes


def test_a_step_that_is_larger_than_estimated_gets_a_smaller_batch() -> None:
    """At 20 and more the captured step needs a twentieth more than a line through 4 and 8."""

    def capture(batch: int) -> Graph:
        return step(batch if batch < 20 else batch + batch // 20)

    found = proven_batch(capture, PlanRequest(300, limits=QUICK))
    assert found.too_large is not None and found.batch < found.too_large
    assert found.outcome.plan is not None
    verify(found.outcome.plan, capture(found.batch))


def test_no_batch_fits() -> None:
    with pytest.raises(InfeasibleBudget, match=r"not even a batch of 1 fits 3 B.*overhead of at"):
        proven_batch(step, PlanRequest(3, limits=QUICK, max_overhead=0.5))
