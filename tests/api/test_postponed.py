"""A first step waits for no long comparison; what it left for later comes into use on the way."""

from __future__ import annotations

import copy
import itertools
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import tightfit
from tightfit.allocator import CpuMeter, measure_peak
from tightfit.alternatives.registry import with_alternatives
from tightfit.capture.capture import capture
from tightfit.capture.traced_call import TracedCall
from tightfit.errors import InfeasibleBudget
from tightfit.execution.attach import attached
from tightfit.pricing.exactness import GradualComparison
from tightfit.pricing.price import measured_costs
from tightfit.progress import SILENT
from tightfit.session.whole.postponed import PostponedAlternatives
from tightfit.session.whole.specialisation import Specialisation

MOST_STEPS = 120


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


def test_alternatives_come_into_use_while_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.session.whole.comparing._PART", 1.0)  # on a slow machine, too
    model = images()
    plain = copy.deepcopy(model)
    budget = int(0.75 * needs(plain))
    expected = train(plain, MOST_STEPS)
    del plain
    meter = CpuMeter()
    own = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    start = meter.live_bytes()
    tightfit.fit(model, budget, in_flight=1)  # leaves no room for further calls
    first = train(model, 1)
    one = step_of(model)
    assert one.postponed is not None
    offered = {way.name for op in one.with_postponed.graph.ops for way in op.alternatives}
    before = ways(one)
    model.load_state_dict(images().state_dict())
    losses = train(model, MOST_STEPS)
    assert one.postponed is None
    assert before < ways(one) <= offered  # one that breaks its promise stays out
    assert one.tuner is None
    assert torch.equal(first[0], expected[0])
    assert tightfit.report(model).overhead < 0.5
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    assert meter.peak_bytes() - start + own <= budget


def test_comparing_takes_a_twentieth_of_the_time_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One comparison may take longer; steps after it make up for that."""
    spent: list[float] = []
    go_on = PostponedAlternatives.go_on

    def timed(postponed: PostponedAlternatives, seconds: float, room_bytes: int) -> None:
        began = time.perf_counter()
        go_on(postponed, seconds, room_bytes)
        spent.append(time.perf_counter() - began)
        assert sum(spent) - max(spent) <= (time.perf_counter() - started) / 20

    model = images()
    tightfit.fit(model, int(0.75 * needs(model)), in_flight=1)
    train(model, 1)
    monkeypatch.setattr(PostponedAlternatives, "go_on", timed)
    started = time.perf_counter()
    train(model, 20)
    assert spent


def test_where_every_operator_is_measured_what_takes_long_is_left_for_later_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, after three seconds."""
    model = images()
    given = TracedCall(model, {"model": model}, (torch.randn(32, 3, 32, 32),), {})
    captured = with_alternatives(capture(given))
    monkeypatch.setattr("tightfit.pricing.price._COMPARING_S", 0.0)
    priced = measured_costs(captured, SILENT, postpones=True).captured
    every = priced.with_postponed
    assert every is not None
    count = sum(len(op.alternatives) for op in priced.graph.ops)
    assert count < sum(len(op.alternatives) for op in every.graph.ops)
    assert GradualComparison(every).go_on(float("inf"), 1 << 30)
    after = measured_costs(every, SILENT, postpones=True).captured
    assert after.with_postponed is None
    assert count < sum(len(op.alternatives) for op in after.graph.ops)


def test_what_was_compared_in_time_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = images()
    given = TracedCall(model, {"model": model}, (torch.randn(32, 3, 32, 32),), {})
    captured = with_alternatives(capture(given))
    monkeypatch.setattr("tightfit.pricing.price._COMPARING_S", 1000.0)
    assert measured_costs(captured, SILENT, postpones=True).captured.with_postponed is None


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
