"""Fitted models in an arena: the budget bounds what the process holds, and bits stay."""

from __future__ import annotations

import contextlib
import gc
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from support.memory import fresh_process, held_pages
from support.searches import wait_for_searches
from tightfit.allocator import anonymous_bytes
from tightfit.allocator.replay import poisoned
from tightfit.api.report import Report

MIB = 1 << 20


def wide_net() -> nn.Module:
    """Keeps 24 maps of 4 MiB for its backward."""
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Conv2d(8, 8, 1), nn.Sigmoid())]
    return nn.Sequential(*layers)


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 32))


def images() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(2, 8, 256, 256, generator=generator)


def rows() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(16, 32, generator=generator)


def trained(
    model: nn.Module,
    batches: Iterator[torch.Tensor],
    steps: int,
    *,
    calls: int = 1,
    after: Callable[[int], Any] = lambda step: None,
) -> list[torch.Tensor]:
    """Train, with so many calls for each step of the optimizer; return the parameters."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        for _ in range(calls):
            model(next(batches)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        wait_for_searches(model)  # a better plan comes in the same step each time
        after(step)
    return [p.detach().clone() for p in model.parameters()]


def fitted(model: nn.Module, budget: str) -> nn.Module:
    return tightfit.fit(model, budget, costs="unit", cache=False, arena=True)


def assert_same(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Callable[[Callable[[], None]], None]]:
    """What runs a function where nothing is held that earlier tests have left."""
    with fresh_process() as run:
        yield run


def test_plans_leave_room_for_what_the_process_holds_besides_tensors(elsewhere) -> None:
    elsewhere(_leaves_room_for_ballast)


def _leaves_room_for_ballast() -> None:
    model = fitted(wide_net(), "112MiB")
    held: list[int] = []
    ballast: list[mmap.mmap] = []

    def after(step: int) -> None:
        if step == 0:
            ballast.append(held_pages(24 * MIB))  # not of PyTorch's allocator
        held.append(anonymous_bytes())

    before = anonymous_bytes()
    ours = trained(model, images(), 8, after=after)
    report = tightfit.report(model)
    assert report.held is not None and report.arena is not None
    assert report.held.rest_bytes >= 23 * MIB
    assert report.planned_peak_bytes <= 112 * MIB - report.held.rest_bytes
    assert report.held.total_bytes <= 112 * MIB
    assert max(held[4:]) - before <= 116 * MIB
    assert report.arena.height_bytes >= 48 * MIB and report.arena.exact_steps >= 2
    tightfit.unfit(model)
    # last: it leaves holes in the heap, where the C library then puts what it would give back
    assert_same(ours, trained(wide_net(), images(), 8))


def test_the_first_plan_leaves_room_for_what_is_there_before_it_runs(elsewhere) -> None:
    elsewhere(_first_plan_leaves_room_for_ballast)


def _first_plan_leaves_room_for_ballast() -> None:
    model = fitted(wide_net(), "112MiB")
    ballast = held_pages(24 * MIB)
    trained(model, images(), 1)
    report = tightfit.report(model)
    assert isinstance(report, Report) and report.held is not None
    assert report.held.rest_bytes >= len(ballast)
    assert report.planned_peak_bytes <= 112 * MIB - len(ballast)


def test_where_no_plan_leaves_enough_training_goes_on_and_it_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = trained(wide_net(), images(), 6)
    model = fitted(wide_net(), "40MiB")
    ballast: list[mmap.mmap] = []

    def after(step: int) -> None:
        if step == 0:
            ballast.append(held_pages(64 * MIB))

    assert_same(trained(model, images(), 6, after=after), plain)
    said = capsys.readouterr().err
    assert said.count("no plan leaves room for that") == 1
    assert tightfit.report(model).planned_peak_bytes <= 40 * MIB


def arena_of(model: nn.Module) -> tightfit.ArenaReport:
    report = tightfit.report(model)
    assert isinstance(report, Report) and report.arena is not None
    return report.arena


@pytest.fixture
def held_besides(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What the process is said to hold besides tensors; nothing is freed late by a collector.

    What it really holds depends on what earlier tests left and what runs at the same time.
    """
    held = [0]
    monkeypatch.setattr("tightfit.session.addresses.anonymous_bytes", lambda: held[0])
    monkeypatch.setattr("tightfit.session.addresses.code_bytes", lambda: 0)
    gc.disable()
    yield held
    gc.enable()


@pytest.mark.usefixtures("held_besides")
def test_calls_that_add_to_gradients_have_a_layout_each() -> None:
    plain = trained(small_net(), rows(), 10, calls=3)
    model = fitted(small_net(), "8MiB")
    with poisoned():
        assert_same(trained(model, rows(), 10, calls=3), plain)
    report = arena_of(model)
    assert report.exact_steps >= 15 and report.fallbacks == 0


def test_calls_in_flight_leave_room_for_each_other_and_for_what_is_held_besides(
    held_besides: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    def train(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        torch.manual_seed(1)
        batches = rows()
        for _ in range(12):
            losses = [model(next(batches)).square().mean() for _ in range(2)]
            for loss in losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    plain = train(small_net())
    keywords: dict[str, Any] = {"costs": "unit", "cache": False, "arena": True}
    model = tightfit.fit(small_net(), "96MiB", in_flight=2, **keywords)
    held_besides[0] = 64 * MIB
    with poisoned():
        assert_same(train(model), plain)
    report = tightfit.report(model)
    assert isinstance(report, Report) and report.held is not None and report.arena is not None
    assert 63 * MIB < report.held.rest_bytes <= 64 * MIB  # less the arena and what tensors hold
    assert report.planned_peak_bytes <= 96 * MIB - report.held.rest_bytes
    assert report.arena.exact_steps >= 2 and report.arena.fallbacks == 0
    assert "exceeds the budget" not in capsys.readouterr().err


@pytest.mark.usefixtures("held_besides")
def test_each_shape_of_the_inputs_has_a_layout_of_its_own() -> None:
    def lengths() -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        while True:
            for length in (16, 48, 8):
                yield torch.randn(length, 32, generator=generator)

    plain = trained(small_net(), lengths(), 24)
    model = fitted(small_net(), "32MiB")
    with poisoned():
        assert_same(trained(model, lengths(), 24), plain)
    report = arena_of(model)
    assert report.exact_steps >= 6 and report.fallbacks == 0 and report.layouts >= 3


@pytest.mark.usefixtures("held_besides")
def test_models_in_turns_and_copies_share_an_arena() -> None:
    def train(first: nn.Module, second: nn.Module) -> list[torch.Tensor]:
        optimizers = [torch.optim.Adam(model.parameters()) for model in (first, second)]
        torch.manual_seed(1)
        batches = rows()
        for _ in range(10):
            made = first(next(batches))
            second(made.detach()).square().mean().backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            second(made).square().mean().backward()  # in a step of the first
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for model in (first, second):
                wait_for_searches(model)
        return [p.detach().clone() for model in (first, second) for p in model.parameters()]

    plain = train(small_net(), small_net())
    budget = tightfit.Budget("16MiB")
    models = [
        tightfit.fit(small_net(), budget, costs="unit", cache=False, arena=True) for _ in range(2)
    ]
    with poisoned():
        assert_same(train(*models), plain)
    report = arena_of(models[0])
    assert report == arena_of(models[1])
    assert report.exact_steps >= 4 and report.height_bytes < MIB
    for model in models:
        tightfit.unfit(model)
    with tightfit.arena() as again:
        again.step()


def test_an_arena_that_is_entered_takes_over_until_it_ends() -> None:
    plain = trained(small_net(), rows(), 18)
    model = fitted(small_net(), "8MiB")
    entered = contextlib.ExitStack()
    arenas: list[tightfit.Arena] = []

    def after(step: int) -> None:
        if step == 5:
            arenas.append(entered.enter_context(tightfit.arena()))
        elif 5 < step < 12:
            arenas[0].step()
        elif step == 12:
            entered.close()

    with poisoned():
        assert_same(trained(model, rows(), 18, after=after), plain)
    assert arenas[0].report.exact_steps >= 2
    assert arena_of(model).exact_steps >= 1  # its own again


def test_evaluations_between_steps_belong_to_no_step() -> None:
    model = fitted(small_net(), "8MiB")

    def evaluate(step: int) -> None:
        if step % 3 == 2:
            with torch.no_grad():
                model.eval()(torch.ones(64, 32))
            model.train()

    trained(model, rows(), 12, after=evaluate)
    report = arena_of(model)
    assert report.exact_steps >= 6 and report.fallbacks == 0
