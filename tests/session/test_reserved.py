"""Plans leave what a GPU's allocator loses: learned from retries, in two or three rounds."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tightfit
from tests.support.fragmenting import Fragmenting
from tightfit.allocator.caching import AllocatorState
from tightfit.api.report import Report
from tightfit.session.memory.fragmentation import AllocatorStep, Fragmentation
from tightfit.session.on_gpu.reserved import Reserved

MIB = 1 << 20
BUDGET = 12 * MIB


class Broken(nn.Module):
    """Python that Dynamo does not follow stands between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = net(256), net()

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def net(last: int = 8) -> nn.Module:
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(256, last))


def fitted(
    monkeypatch: pytest.MonkeyPatch, share: float, budget: int = BUDGET, **options: Any
) -> tuple[nn.Module, Fragmenting]:
    """Fit a model on the CPU whose allocator loses a share, as one of a GPU."""
    gc.collect()  # it counts all that is allocated: what others have left must not go amid steps
    made: list[Fragmenting] = []
    limit_bytes = None if "on_exceed" in options else budget

    def on_a_device(name: str, account: Any, options: Any) -> Reserved:
        made.append(Fragmenting(account, share, limit_bytes))
        return Reserved(name, account, made[-1])

    monkeypatch.setattr("tightfit.session.fitted.addresses_for", on_a_device)
    torch.manual_seed(0)
    model = options.pop("make", net)()
    options = {"costs": "unit", "cache": False, "limits": (0.5, 0.01), **options}
    return tightfit.fit(model, budget, **options), made[0]


def train(model: nn.Module, steps: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.randn(1100, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def report_of(model: nn.Module) -> Report:
    report = tightfit.report(model)
    assert isinstance(report, Report)
    return report


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("share", "net_mib", "broken_mib"), [(0.05, 11.5, 21), (0.15, 12, 22), (0.4, 13, 24)]
)
@pytest.mark.parametrize("make", [net, Broken])
def test_within_three_rounds_steps_run_without_a_retry(
    monkeypatch: pytest.MonkeyPatch, make: Any, share: float, net_mib: float, broken_mib: float
) -> None:
    torch.manual_seed(0)
    plain = train(make(), 12)
    budget = round((net_mib if make is net else broken_mib) * MIB)
    model, allocator = fitted(monkeypatch, share, budget, make=make)
    trained = train(model, 12)
    assert all(torch.equal(a, b) for a, b in zip(trained, plain, strict=True))
    assert 1 <= allocator.returned <= 3 and allocator.retries > 0
    before = allocator.retries
    train(model, 20)
    assert allocator.retries == before
    assert allocator.most_bytes <= budget
    report = report_of(model)
    assert report.reserved_bytes is not None
    assert report.planned_peak_bytes <= report.reserved_bytes <= budget
    assert "reserved" in str(report)


def test_where_nothing_is_lost_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, allocator = fitted(monkeypatch, 0.0)
    train(model, 8)
    report_of(model).html(tmp_path / "report.html")
    assert "has reserved" in (tmp_path / "report.html").read_text("utf-8")
    assert allocator.returned == allocator.retries == 0
    assert report_of(model).planned_peak_bytes > 0.9 * BUDGET


def test_the_first_plan_leaves_a_page_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fragmenting, "page_bytes", MIB // 4)
    model, allocator = fitted(monkeypatch, 0.02)
    train(model, 8)
    assert report_of(model).planned_peak_bytes <= BUDGET - MIB // 4
    assert allocator.returned == allocator.retries == 0


def test_where_no_plan_leaves_so_much_it_is_said_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr("tightfit.session.on_gpu.reserved.announce", said.append)
    model, allocator = fitted(monkeypatch, 4.0)
    train(model, 8)
    assert any("no plan leaves" in text for text in said)
    assert allocator.most_bytes <= BUDGET


def test_without_a_limit_more_than_the_budget_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = fitted(monkeypatch, 4.0, on_exceed="warn")
    with pytest.warns(UserWarning, match="has reserved .*, more than the budget of 12.00 MiB") as w:
        train(model, 6)
    assert len([each for each in w if "has reserved" in str(each.message)]) == 1


def test_without_a_limit_plans_leave_what_is_lost_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = fitted(monkeypatch, 0.15, on_exceed="warn")
    train(model, 12)
    report = report_of(model)
    assert report.reserved_bytes is not None and report.reserved_bytes <= BUDGET


@given(
    share=st.floats(0, 0.6),
    kept=st.floats(0.3, 1.0),
    noise=st.lists(st.floats(0.8, 1.2), min_size=9),
)
def test_the_loop_ends_within_three_rounds(share: float, kept: float, noise: list[float]) -> None:
    """Whatever a plan keeps of its room, and however much what is lost varies."""
    fragmentation, limit = Fragmentation(), 1 << 34
    for factor in noise:
        planned = limit - fragmentation.left_bytes
        planned -= round((1 - kept) * planned / 8)
        step = AllocatorStep(AllocatorState(planned // 4, planned // 4, 0))
        retries, reserved = 0, planned // 4
        for part in range(4, 65):
            allocated = planned * part // 64
            needed = round(allocated * (1 + share * factor))
            if needed > limit:
                retries, needed = retries + 1, allocated
            reserved = max(needed, reserved) if not retries else needed
            step.note(AllocatorState(allocated, reserved, retries))
        fragmentation.learn(step, limit, is_whole=True)
    assert fragmentation.rounds <= 3
    assert 0 <= fragmentation.left_bytes < limit
