"""Plans and costs from steps are found again, verified, and can be left aside."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import tightfit
from benchmarks.training import let_search_end
from support.planning import planners_called
from tightfit.execution.attach import attached
from tightfit.planners.outcomes import no_plan
from tightfit.session import stages as pipeline
from tightfit.session.whole import planning


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return the names of the planners that are called, in a cache of the test's own."""
    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path))
    return planners_called(monkeypatch, pipeline, "plan_with", "plan_apart")


def train(steps: int = 1, **keywords) -> tightfit.Report:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    tightfit.fit(model, **{"budget": "200KiB", "limits": (1, 0.01), **keywords})
    for _ in range(steps):
        model(torch.ones(8, 16)).sum().backward()
        model.zero_grad()
    let_search_end()
    return tightfit.report(model)


def test_the_same_step_is_planned_once(planned: list[str]) -> None:
    first = train(costs="flops")
    again = train(costs="flops")
    assert planned == ["anytime"]
    assert again.plan == first.plan and again.overhead == first.overhead


def test_other_costs_and_budgets_have_other_plans_in_the_cache(
    planned: list[str], tmp_path: Path
) -> None:
    for decides in (
        {},
        {"costs": "unit"},
        {"budget": "150KiB"},
        {"limits": (2, 0.01)},
        {"planner": "greedy"},
    ):
        train(**{"costs": "flops", **decides})
        shutil.rmtree(tmp_path / "earlier", ignore_errors=True)  # plans to begin with
    assert len(planned) == 5


def test_nothing_is_planned_again_where_nothing_is_recomputed(planned: list[str]) -> None:
    for decides in ({}, {"costs": "unit"}, {"limits": (2, 0.01)}):
        assert train(**{"costs": "flops", **decides}).status == "optimal"
    assert len(planned) == 1


def test_the_cache_can_be_left_aside(planned: list[str], tmp_path: Path) -> None:
    train(costs="flops", cache=False)
    train(costs="flops", cache=False)
    assert len(planned) == 2
    assert not list(tmp_path.rglob("*.json.gz"))


def test_a_damaged_plan_is_made_again(planned: list[str], tmp_path: Path) -> None:
    train(costs="flops")
    for file in tmp_path.rglob("*.json.gz"):
        file.write_bytes(b"not a plan")
    with pytest.warns(UserWarning, match="ignored and planned again"):
        train(costs="flops")
    assert len(planned) == 2


def test_costs_from_steps_are_known_to_the_next_process(planned: list[str]) -> None:
    assert train(steps=1).cost_source == "measured"
    tuned = train(steps=7)
    assert tuned.cost_source == "measured in steps"
    assert train(steps=1).cost_source == "measured in steps"
    assert train(steps=1, cache=False).cost_source == "measured"
    again = train(steps=7)
    assert again.plan.instructions == tuned.plan.instructions
    assert again.overhead == tuned.overhead


def test_a_process_begins_with_the_plan_of_the_one_before(
    planned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it learned of costs in the meantime does not matter, nor does it search first."""
    first = train(steps=7)
    assert first.plan is not None and planned
    with monkeypatch.context() as patch:
        patch.setattr(planning, "plan_at_once", None)
        again = train(steps=1)
    assert again.plan is not None and again.overhead <= first.overhead + 0.01
    assert train(steps=1, budget="190KiB").plan is not None


def test_the_plan_of_a_least_budget_is_known_to_the_next_process(
    planned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another search might not find it again in its time."""

    def model() -> nn.Module:
        layers = (layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh()))
        return nn.Sequential(*layers)

    x = torch.ones(256, 64)
    first = tightfit.fit(model(), "1GiB", costs="unit", limits=(1, 0.01))
    budget = attached(first).smallest_budget((x,), {}).found_bytes + 4096
    nothing = no_plan(started=time.perf_counter(), proven=False)
    monkeypatch.setattr(pipeline, "plan_with", lambda *args, **keywords: nothing)
    monkeypatch.setattr(pipeline, "minimum_budget", None)
    again = tightfit.fit(model(), budget, costs="unit", limits=(1, 0.01))
    again(x).sum().backward()
    let_search_end()
    report = tightfit.report(again)
    assert report.planned_peak_bytes <= budget and report.overhead > 0
