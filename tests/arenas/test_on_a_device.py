"""The executor's side of an arena on a GPU, on the CPU: a pool that follows the same rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from tests.support.pools import FakeArenaMemory
from tightfit.allocator.cuda_arena_memory import ArenaMemoryState
from tightfit.api.report import Report
from tightfit.errors import BadInput
from tightfit.layout import holes
from tightfit.layout.blocks import Block
from tightfit.layout.holes import Script
from tightfit.session.on_gpu.addresses import DeviceAddresses

MIB = 1 << 20


LaidOut = tuple[list[Block], Script]


class Led(FakeArenaMemory):
    """Makes the requests that ops of a step make; says how often they were to lie in it.

    Parameters
    ----------
    known : list
        The steps that were laid out, the newest last.
    """

    def __init__(self, height_bytes: int, known: list[LaidOut]) -> None:
        super().__init__(height_bytes)
        self.seen = {"enter": 0, "leave": 0}
        self.known = known
        self._blocks: list[Block] = []
        self._turns: list[int] = []
        self._last: int | None = None
        self._alive: dict[int, Any] = {}

    def state(self) -> ArenaMemoryState:
        self._alive.clear()
        self._turns = []
        return super().state()

    def take(self, size_bytes: int) -> tuple[int, Any]:
        if not self._turns:  # a step begins: all of it is held
            found = (one for one in reversed(self.known) if one[1].height_bytes == size_bytes)
            self._blocks, script = next(found)
            self._turns = sorted(n for n, turn in script.turns.items() if turn.is_inside)
            self._last = None
        return super().take(size_bytes)

    def enter(self) -> None:
        self.seen["enter"] += 1
        super().enter()
        if self._turns:
            now = 0 if self._last is None else self._turns.index(self._last) + 1
            self._run_op(self._last, self._turns[now])
            self._last = self._turns[now]

    def _run_op(self, last: int | None, now: int) -> None:
        for block in self._blocks:
            if last is not None and block.lower == 2 * last:
                self._alive[block.id] = self.pool.request(block.size_bytes)
        for block in self._blocks:
            if block.upper <= 2 * now:
                self._alive.pop(block.id, None)

    def leave(self) -> None:
        self.seen["leave"] += 1
        super().leave()


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> list[Led]:
    """Let `arena=True` do on the CPU what it does on a GPU."""
    made: list[Led] = []
    known: list[LaidOut] = []
    lay_out = holes.script_of

    def noted(blocks: list[Block], **more: Any) -> Script:
        known.append((blocks, lay_out(blocks, **more)))
        return known[-1][1]

    def memory_for(height_bytes: int) -> Led:
        made.append(Led(height_bytes, known))
        return made[-1]

    def on_a_device(name: str, account: Any, options: Any) -> DeviceAddresses:
        return DeviceAddresses(name, account, options, memory_for)

    monkeypatch.setattr(holes, "script_of", noted)
    monkeypatch.setattr("tightfit.session.fitted.addresses_for", on_a_device)
    monkeypatch.setattr("tightfit.session.handles.addresses_for", on_a_device)
    return made


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.Tanh())]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(512, 8))


def train(model: nn.Module, steps: int = 6, *, calls: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        for _ in range(calls):
            model(torch.randn(1024, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def same(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def report_of(model: nn.Module) -> Report:
    report = tightfit.report(model)
    assert isinstance(report, Report)
    return report


@pytest.mark.parametrize("calls", [1, 2])
def test_a_placed_step_says_before_each_large_request_what_comes(
    memories: list[Led], calls: int
) -> None:
    plain = train(net(), calls=calls)
    model = tightfit.fit(net(), "64MiB", costs="unit", cache=False, arena=True)
    assert same(train(model, calls=calls), plain)
    report = report_of(model)
    assert report.arena is not None and report.held is not None
    assert report.arena.steps == report.arena.exact_steps == 6 * calls
    assert report.arena.fallbacks == 0 and report.arena.height_bytes > 8 * MIB
    assert report.held.height_bytes == report.arena.height_bytes
    memory = memories[-1]
    assert memory.seen["enter"] > 20 and not memory.is_inside
    assert memory.state() == "free"  # nothing is held after a step
    tightfit.unfit(model)
    assert same(train(net(), calls=calls), plain)


def test_plans_leave_what_their_layout_is_higher(memories: list[Led]) -> None:
    model = tightfit.fit(net(), "40MiB", costs="unit", cache=False, arena=True)
    plain = train(net())
    assert same(train(model), plain)
    report = report_of(model)
    assert report.arena is not None
    held = report.constant_bytes + report.arena.height_bytes + report.arena.outlived_bytes
    assert held <= 40 * MIB and report.planned_peak_bytes < 40 * MIB


def test_an_operator_whose_requests_have_no_room_lies_elsewhere_from_then_on(
    memories: list[Led], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One instruction requests more while it runs than it was measured to take."""
    run_op = Led._run_op
    greedy: list[int] = []

    def requests_more(self: Led, last: int | None, now: int) -> None:
        run_op(self, last, now)
        greedy.append(now)
        if len(greedy) > 3 and now == greedy[3]:
            self.pool.request(96 * MIB)

    monkeypatch.setattr(Led, "_run_op", requests_more)
    model = tightfit.fit(net(), "64MiB", costs="unit", cache=False, arena=True)
    plain = train(net())
    assert same(train(model), plain)
    report = report_of(model).arena
    assert report is not None
    assert report.steps == report.exact_steps == 6
    assert report.requests < 6 * len(memories[-1].known[0][1].places)


def test_a_call_that_is_let_go_of_does_not_keep_the_arena(memories: list[Led]) -> None:
    model = tightfit.fit(net(), "64MiB", costs="unit", cache=False, arena=True)
    train(model, 2)
    torch.manual_seed(2)
    abandoned = model(torch.randn(1024, 512))
    second = model(torch.randn(1024, 512))  # at the same time: placed elsewhere
    second.sum().backward()
    del abandoned, second
    model.zero_grad()
    train(model, 2)
    report = report_of(model).arena
    assert report is not None
    assert (report.steps, report.exact_steps, report.fallbacks) == (5, 4, 0)


def test_a_backward_that_fails_ends_its_step(memories: list[Led]) -> None:
    model = tightfit.fit(net(), "64MiB", costs="unit", cache=False, arena=True)
    train(model, 2)

    def refuse(gradient: torch.Tensor) -> None:
        raise KeyError

    handle = next(iter(model.parameters())).register_hook(refuse)
    loss = model(torch.randn(1024, 512)).sum()
    with pytest.raises(KeyError):
        loss.backward()
    handle.remove()
    del loss
    model.zero_grad()
    assert not memories[-1].is_inside
    train(model, 2)
    report = report_of(model).arena
    assert report is not None and report.exact_steps >= 4 and report.fallbacks == 0


def test_what_cannot_be_placed_is_refused_by_name(memories: list[Led]) -> None:
    with pytest.raises(BadInput, match="a compiled plan requests memory in an order of its own"):
        tightfit.fit(net(), "64MiB", arena=True, compile=True)


def test_a_device_that_cannot_be_asked_is_refused_by_name() -> None:
    account = type("Account", (), {"device": torch.device("xpu")})()
    with pytest.raises(BadInput, match="is on xpu: it is no CUDA device"):
        DeviceAddresses("Linear", account, None)  # type: ignore[arg-type]
