"""Planning in another process gives what planning in this one gives."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec
import pytest

from support.papers import chain, peak_bytes
from support.planning import planners_called
from tightfit.errors import BadInput
from tightfit.planners import apart
from tightfit.planners.apart import plan_apart, plan_each_apart
from tightfit.planners.base import Limits, Task
from tightfit.planners.child import run_in_child
from tightfit.planners.registry import plan_with
from tightfit.progress import Silent

GRAPH = chain([2, 4, 1, 3])
TIGHT = Task(graph=GRAPH, budget_bytes=peak_bytes(GRAPH) - 2)
LIMITS = Limits(seconds=5.0)


@pytest.fixture
def planned_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the planners that run in this process."""
    return planners_called(monkeypatch, apart, "plan_with")


def test_another_process_finds_the_same(planned_here: list[str]) -> None:
    outcome, here = plan_apart("anytime", TIGHT, LIMITS), plan_with("anytime", TIGHT, LIMITS)
    assert planned_here == []
    assert (outcome.plan, outcome.overhead, outcome.bound) == (here.plan, here.overhead, here.bound)


def test_an_earlier_plan_goes_along(planned_here: list[str]) -> None:
    known = plan_with("anytime", TIGHT, LIMITS).plan
    outcome = plan_apart("gist", TIGHT, LIMITS, known=known)
    assert planned_here == []
    assert outcome.plan is not None and known is not None
    assert outcome.plan.instructions == known.instructions


def test_one_process_plans_several_and_this_one_those_that_are_left(
    planned_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [TIGHT, msgspec.structs.replace(TIGHT, budget_bytes=1 << 20), TIGHT]
    expected = [plan_with("anytime", task, LIMITS).plan for task in tasks]
    started: list[float] = []

    def counted(*words: Any, seconds: float, on_report: Any, **named: Any) -> bool:
        started.append(seconds)
        left = iter(range(len(tasks) + 1 - len(started)))  # the second process dies amid the third

        def reported(message: bytes) -> None:
            if not message or next(left, None) is not None:
                on_report(message)

        return run_in_child(*words, seconds=seconds, on_report=reported, **named)

    monkeypatch.setattr(apart, "run_in_child", counted)
    for planned in ([], ["anytime"]):
        found = plan_each_apart("anytime", tasks, LIMITS)
        assert [outcome.plan for outcome in found] == expected
        assert planned_here == planned
    assert len(started) == 2
    assert plan_each_apart("anytime", (), LIMITS) == []


@pytest.mark.parametrize("executable", ["", f"{os.sep}no{os.sep}python"])
def test_where_there_is_no_other_process_this_one_plans(
    executable: str, planned_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    assert plan_apart("anytime", TIGHT, LIMITS).plan is not None
    assert planned_here == ["anytime"]


def test_what_the_planner_raises_is_raised_here() -> None:
    with pytest.raises(BadInput, match="no planner is called 'checkmait'"):
        plan_apart("checkmait", TIGHT, LIMITS)


def test_a_search_apart_can_be_dropped() -> None:
    class Impatient(Silent):
        def update(self, done: int, note: str = "") -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan_apart("anytime", TIGHT, LIMITS, Impatient())
