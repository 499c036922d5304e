"""A budget that plain PyTorch keeps to is not refused, whatever the search for a plan finds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from tightfit.allocator.tally import CpuTally
from tightfit.errors import InfeasibleBudget
from tightfit.execution.attach import attached
from tightfit.session.whole import optimistic, plans


@pytest.fixture(autouse=True)
def no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """No search finds a plan."""

    def planned_for(*args: Any, **kwargs: Any) -> Any:
        raise InfeasibleBudget("none was found", budget_bytes=0, minimum_bytes=1 << 40)

    monkeypatch.setattr(plans, "planned_for", planned_for)
    monkeypatch.setattr(optimistic.LessExpected, "planned", lambda *args: None)


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers)


def plain_bytes() -> tuple[nn.Module, int]:
    """A model that plain PyTorch has trained, and the most that it held, parameters included."""
    tally = CpuTally()
    plain = model()
    train(plain)
    return plain, tally.take_peak_bytes()


def train(net: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(step)
        net(torch.randn(4096, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_it_runs_as_plain_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    plain, budget = plain_bytes()
    net = tightfit.fit(model(), budget, cache=False)
    train(net)
    assert all(map(torch.equal, net.state_dict().values(), plain.state_dict().values()))
    assert capsys.readouterr().err.count("It runs as plain PyTorch") == 1


def test_a_budget_far_below_is_refused_and_nothing_has_changed() -> None:
    net = model()
    before = copy.deepcopy(net.state_dict())
    tightfit.fit(net, "4MiB", cache=False)
    with pytest.raises(InfeasibleBudget):
        train(net)
    assert all(map(torch.equal, net.state_dict().values(), before.values()))


def test_where_it_does_not_fit_either_no_code_of_its_graph_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(optimistic.LessExpected, "plain_bytes", lambda *args: 0)
    with pytest.raises(InfeasibleBudget):
        train(tightfit.fit(model(), "4MiB", cache=False))
    printed = capsys.readouterr().err
    assert "It runs as plain PyTorch" in printed and "Traceback" not in printed


def test_another_budget_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _, budget = plain_bytes()
    net = tightfit.fit(model(), budget, cache=False)
    train(net)
    monkeypatch.undo()
    attached(net).change_budget(1 << 30)
    train(net)
    assert tightfit.report(net).plan is not None
