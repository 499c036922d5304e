"""What an optimizer's step takes is predicted by taking it on tensors without contents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import tightfit
from tightfit.allocator import CpuMeter, measure_peak
from tightfit.capture.capture import capture
from tightfit.capture.traced_call import TracedCall
from tightfit.errors import BudgetExceeded
from tightfit.session.memory import optimizers, steps
from tightfit.session.memory.forecast import growing_bytes, step_needs
from tightfit.session.memory.surroundings import assumed_outside_bytes

WAYS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
    "Adafactor": torch.optim.Adafactor,
    "NAdam": torch.optim.NAdam,
}
SCALARS_BYTES = 256  # a few numbers as tensors, which kernels make inside


@pytest.mark.parametrize("name", WAYS)
def test_state_and_what_passes_are_predicted(name: str) -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 64))
    optimizer = WAYS[name](model.parameters())
    for step in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        needs = step_needs(optimizer, 64)
        assert needs is not None
        meter = CpuMeter()
        before = meter.live_bytes()
        optimizer.step()
        after = meter.live_bytes()
        if step == 0:
            assert needs.state_bytes("cpu") == after - before
        assert 0 <= needs.temporary_bytes - (meter.peak_bytes() - after) <= SCALARS_BYTES


@pytest.mark.parametrize("name", WAYS)
def test_parameters_without_a_gradient_are_skipped(name: str) -> None:
    """Those of the second layer have one in the second step only, those of the last in none."""
    model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 64), nn.Linear(64, 512))
    optimizer = WAYS[name](model.parameters())
    for step in range(3):
        for parameter in model[: min(step + 1, 2)].parameters():
            parameter.grad = torch.ones_like(parameter)
        skipped = {id(p) for p in model.parameters() if p.grad is None}
        needs = step_needs(optimizer, 64, skipped=skipped)
        assert needs is not None
        meter = CpuMeter()
        before = meter.live_bytes()
        optimizer.step()
        assert needs.state_bytes("cpu") == meter.live_bytes() - before


class TakingTurns(nn.Module):
    """All layers but one run in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, left_out: int) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number == left_out else layer(x)
        return x


def test_steps_are_not_predicted_again_while_parameters_take_turns(monkeypatch) -> None:
    predicted = []

    def counted(*given: Any, **keywords: Any) -> Any:
        predicted.append(given)
        return step_needs(*given, **keywords)

    monkeypatch.setattr(optimizers, "step_needs", counted)
    monkeypatch.setattr(steps, "step_needs", counted)
    model = TakingTurns()
    optimizer = torch.optim.Adam(model.parameters())
    tightfit.fit(model, "64MiB", optimizer=optimizer, costs="unit", cache=False)
    for step in range(12):
        model(torch.randn(4, 8), step % 3).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            predicted.clear()  # all parameters have their state now
    assert len(predicted) <= 1


@pytest.mark.parametrize("kind", ["all optimizers", "one optimizer"])
def test_hooks_are_not_called_by_the_forecast(kind: str) -> None:
    heard: list[Any] = []
    optimizer = torch.optim.Adam(nn.Linear(1, 1).parameters())  # numbers that are no counters
    if kind == "one optimizer":
        handle = optimizer.register_step_pre_hook(lambda *given: heard.append(given))
    else:
        handle = register_optimizer_step_post_hook(lambda *given: heard.append(given))
    assert step_needs(optimizer, 64) is not None
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1, 1)
    optimizer.step()
    assert step_needs(optimizer, 64) is not None
    handle.remove()
    assert len(heard) == 1


def test_hooks_are_not_called_if_dynamo_has_wrapped_the_step(monkeypatch) -> None:
    """It does so with sparse Adam's, hooks included."""
    heard: list[Any] = []
    optimizer = torch.optim.Adam(nn.Linear(1, 1).parameters())
    wrapped = torch.compiler.disable(torch.optim.Adam.step)
    monkeypatch.setattr(torch.optim.Adam, "step", wrapped)
    handle = register_optimizer_step_pre_hook(lambda *given: heard.append(given))
    assert step_needs(optimizer, 64) is not None
    handle.remove()
    assert not heard


def test_an_optimizer_that_cannot_step_on_fakes_is_not_predicted() -> None:
    optimizer = torch.optim.LBFGS(nn.Linear(4, 4).parameters())
    assert step_needs(optimizer, 64) is None


def test_the_history_of_lbfgs_is_predicted() -> None:
    model, x = nn.Linear(64, 64), torch.randn(256, 64)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).tanh().sub(x).square().mean()
        loss.backward()
        return loss

    entry_bytes = 2 * sum(p.nbytes for p in model.parameters())
    assert growing_bytes(optimizer, 64) == 3 * entry_bytes and not optimizer.state
    expected, held = [], []
    for _ in range(4):
        optimizer.step(closure)
        expected.append(growing_bytes(optimizer, 64))
        state = optimizer.state[model.weight]
        held.append(sum(t.nbytes for t in [*state["old_dirs"], *state["old_stps"]]))
    assert [a + b for a, b in zip(expected, held, strict=True)] == [3 * entry_bytes] * 4
    assert expected[-1] == 0


LOSSES: dict[str, tuple[nn.Module, Callable[..., Any], torch.Tensor]] = {
    "scores": (nn.Identity(), F.cross_entropy, torch.randint(64, (32,))),
    "logarithms": (nn.LogSoftmax(1), F.nll_loss, torch.randint(64, (32,))),
    "probabilities": (nn.Sigmoid(), F.binary_cross_entropy, torch.rand(32, 64)),
    "pictures": (nn.Tanh(), F.mse_loss, torch.rand(32, 64)),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_memory_of_a_loss_outside_is_assumed_from_its_inputs(kind: str) -> None:
    last, loss, target = LOSSES[kind]
    model, x = nn.Sequential(nn.Linear(8, 64), last), torch.randn(32, 8)
    assumed = assumed_outside_bytes(capture(TracedCall(model, {"model": model}, (x,), {})))
    given = model(x).detach().requires_grad_()
    _, peak = measure_peak(lambda: loss(given, target).backward(), device="cpu")
    assert 0 <= assumed - (peak.peak_bytes - SCALARS_BYTES) <= 2 * SCALARS_BYTES


def test_the_budget_named_for_a_step_has_room_for_numbers_that_a_loop_keeps() -> None:
    """Losses that are kept come after the first step, for which the budget is named."""

    def train(budget: int) -> int | None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 4))
        optimizer = torch.optim.Adam(model.parameters())
        tightfit.fit(model, budget, optimizer=optimizer, costs="unit", cache=False)
        losses = []
        try:
            for _ in range(4):
                optimizer.zero_grad()
                loss = model(torch.randn(8, 128)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        except BudgetExceeded as error:
            return error.measured_bytes
        return None

    plan_bytes = 900 << 10  # has room for a backward, and none for the state
    named = train(plan_bytes)
    assert named is not None
    assert train(named) is None


def test_the_budget_named_for_a_step_has_room_for_the_steps_of_others() -> None:
    """Of two models that share a budget: the second has not stepped yet."""

    def train(size: int) -> int | None:
        torch.manual_seed(0)
        budget = tightfit.Budget(size)
        models = nn.Linear(256, 256), nn.Linear(256, 512)
        optimizers = [torch.optim.Adam(model.parameters()) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            tightfit.fit(model, budget, optimizer=optimizer, costs="unit", cache=False)
        try:
            for _ in range(3):
                for model, optimizer in zip(models, optimizers, strict=True):
                    optimizer.zero_grad()
                    model(torch.randn(8, 256)).square().mean().backward()
                    optimizer.step()
        except BudgetExceeded as error:
            return error.measured_bytes
        return None

    named = train(1400 << 10)  # no room for the state of the first
    assert named is not None
    assert train(named) is None
