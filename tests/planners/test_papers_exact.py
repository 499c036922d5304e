"""Checkmate and MONeT find the optimum of their own search space."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings

from papers_cases import least_checkmate_overhead, least_monet_overhead, tasks
from tightfit.plan.plan import Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.checkmate.solve import plan_checkmate, plan_checkmate_rounding
from tightfit.planners.monet.solve import plan_monet, plan_monet_loose
from tightfit.progress import SILENT

EXACT = Limits(seconds=60, gap=1e-7)
SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def check_optimum(outcome: Outcome, least: float) -> None:
    if math.isinf(least):
        assert outcome.plan is None
        assert math.isinf(outcome.bound)
    else:
        assert outcome.plan is not None
        assert outcome.overhead == pytest.approx(least, abs=2e-6)
        assert outcome.bound <= least + 2e-6
        assert outcome.status == "optimal"


@SETTINGS
@given(tasks())
def test_checkmate_is_the_optimum_of_its_search_space(task: Task) -> None:
    check_optimum(plan_checkmate(task, EXACT, SILENT), least_checkmate_overhead(task))
