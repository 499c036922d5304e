"""On a GPU there is one peak for all who ask: it is the user's, once plans are learned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import tightfit
from tests.support.statistics import OnePeak, steps_metered_as_on_a_gpu
from tightfit.allocator import CpuMeter
from tightfit.errors import BudgetExceeded
from tightfit.execution import guard as guarding
from tightfit.execution.attach import attached
from tightfit.execution.guard import Guard
from tightfit.living import Living

KIB = 1 << 10
TENTH = 10


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> OnePeak:
    monkeypatch.setattr(guarding, "_GUARDS", Living())
    return steps_metered_as_on_a_gpu(monkeypatch)


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(64, 8))


class Broken(nn.Module):
    """Python that Dynamo does not follow stands between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = net(), nn.Sequential(nn.Linear(8, 64), net())

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def step_of(model: nn.Module) -> Callable[[int], None]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: int) -> None:
        model(torch.randn(batch, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def peak_and_truth(device: OnePeak, step: Callable[[], None]) -> tuple[int, int]:
    """Return what a user sees of a step, and what another meter sees."""
    truth = CpuMeter()
    device.reset()
    start = device.statistics()["requested_bytes.all.current"]
    truth.reset_peak()
    own = truth.live_bytes()
    step()
    return device.peak_bytes() - start, truth.peak_bytes() - own


@pytest.mark.parametrize("make", [net, Broken])
def test_from_the_tenth_step_on_the_peak_is_the_users(
    device: OnePeak, make: Callable[[], nn.Module]
) -> None:
    model = tightfit.fit(make(), "16MiB", cache=False, costs="unit")
    step = step_of(model)
    for _ in range(TENTH - 1):
        step(128)
    resets = device.resets
    for number in range(6):
        seen, true = peak_and_truth(device, lambda: step(128))
        assert seen == true > 128 * 64 * 4
        assert device.resets == resets + number + 1  # the user's own
    assert tightfit.report(model).measured is not None
    assert device.resets == resets + 6


def test_each_shape_has_its_tenth_step(device: OnePeak) -> None:
    model = tightfit.fit(net(), "16MiB", cache=False, costs="unit")
    step = step_of(model)
    for _ in range(TENTH - 1):
        step(128)
    step(96)
    resets = device.resets
    seen, true = peak_and_truth(device, lambda: step(128))
    assert seen == true and device.resets == resets + 1
    step(96)
    assert device.resets > resets + 1


def test_what_exceeds_the_budget_later_is_still_noticed(device: OnePeak) -> None:
    model = tightfit.fit(net(), "16MiB", cache=False, costs="unit")
    step = step_of(model)
    for _ in range(TENTH):
        step(128)
    guard = attached(model).guard
    measured = guard.steps[-1].peak_bytes
    step(128)
    guard.change_budget(measured)
    much = torch.empty(8 << 20, dtype=torch.uint8)
    del much
    with pytest.raises(BudgetExceeded):
        guard.close()


def held(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


def test_a_known_step_is_not_blamed_for_an_earlier_peak(device: OnePeak) -> None:
    guard = Guard("cpu", "raise")
    device.reset()
    held(300)
    for kib, limit in ((50, 100), (60, 100), (50, 100)):
        guard.before_forward(lambda: 0, limit * KIB, is_known=True)
        guard.after_forward()
        guard.before_backward()
        held(kib)
        guard.after_backward()
        step = guard.close()
        assert step is not None and step.peak_bytes < kib * KIB + 1
    assert not guard.steps and device.resets == 1
    guard.before_forward(lambda: 0, 100 * KIB, is_known=True)
    held(400)
    with pytest.raises(BudgetExceeded):
        guard.close()


def test_a_known_step_that_turns_out_new_is_learned_from(device: OnePeak) -> None:
    guard = Guard("cpu", "raise")
    held(300)
    guard.before_forward(lambda: 0, 100 * KIB, is_known=True)
    guard.learn()
    held(50)
    guard.after_forward()
    assert guard.close() is guard.steps[-1]
    assert 50 * KIB <= guard.steps[-1].forward_bytes < 51 * KIB


def test_the_users_own_reset_amid_a_step_hides_no_more_than_was_before_it(device: OnePeak) -> None:
    guard = Guard("cpu", "raise")
    guard.before_forward(lambda: 0, 100 * KIB, is_known=True)
    held(300)
    device.reset()
    held(400)
    with pytest.raises(BudgetExceeded):
        guard.close()
