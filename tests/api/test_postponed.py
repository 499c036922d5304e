"""A first step waits for no long comparison; what it left for later comes into use on the way."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

import tightfit
from tightfit.allocator import CpuMeter, measure_peak
from tightfit.errors import InfeasibleBudget
from tightfit.execution.attach import attached
from tightfit.session.whole.specialisation import Specialisation


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path))


def images() -> nn.Sequential:
    """Return convolutions whose comparisons read more than is compared at once."""
    torch.manual_seed(0)
    widths = [3, *[8] * 5]
    layers = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        for a, b in itertools.pairwise(widths)
    ]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2048, 4))


def train(model: nn.Module, steps: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(32, 3, 32, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def needs(model: nn.Module) -> int:
    own = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    return measure_peak(lambda: train(copy.deepcopy(model), 2))[1].peak_bytes + own


def step_of(model: nn.Module) -> Specialisation:
    (one,) = attached(model).route.captures
    return one


def ways(one: Specialisation) -> set[str]:
    return {way.name for op in one.captured.graph.ops for way in op.alternatives}


def test_alternatives_come_into_use_while_training_goes_on() -> None:
    model = images()
    plain = copy.deepcopy(model)
    budget = int(0.75 * needs(plain))
    expected = train(plain, 16)
    del plain
    meter = CpuMeter()
    own = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    start = meter.live_bytes()
    tightfit.fit(model, budget, in_flight=1)  # leaves no room for further calls
    first = train(model, 1)
    one = step_of(model)
    assert one.postponed is not None
    offered = {way.name for op in one.hoped.graph.ops for way in op.alternatives}
    before = ways(one)
    model.load_state_dict(images().state_dict())
    losses = train(model, 16)
    assert one.postponed is None
    assert before < ways(one) <= offered  # one that breaks its promise stays out
    assert one.tuner is None
    assert torch.equal(first[0], expected[0])
    assert tightfit.report(model).overhead < 0.5
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    assert meter.peak_bytes() - start + own <= budget


def test_a_budget_that_needs_them_waits_for_them() -> None:
    model = images()
    plain = copy.deepcopy(model)
    expected = train(copy.deepcopy(plain), 3)
    tightfit.fit(model, int(0.25 * needs(plain)))
    with pytest.raises(InfeasibleBudget) as refused:
        train(model, 1)
    assert step_of(model).postponed is None
    assert refused.value.minimum_bytes is not None
    model = images()
    tightfit.fit(model, refused.value.minimum_bytes)
    losses = train(model, 3)
    assert step_of(model).postponed is None
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))


def test_a_budget_that_does_not_bind_has_nothing_compared() -> None:
    model = images()
    tightfit.fit(model, 2 * needs(model))
    train(model, 12)
    assert step_of(model).postponed is not None
    assert step_of(model).tuner is None
