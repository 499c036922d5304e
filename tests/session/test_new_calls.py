"""Calls whose plans would be used once run as plain PyTorch, where that is expected to fit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tightfit
from tightfit.capture.calls.structure import Arguments
from tightfit.session.new_calls import NewCalls

ROOM = 100


def call(shape: str, size: int) -> Arguments:
    return Arguments.of((torch.empty(size),), {"shape": shape})


def decided(calls: NewCalls, shape: str, size: int, plain_bytes: int = 10) -> bool:
    """Ask about a call; note it as planned, with a new plan, if it is not to run plainly."""
    given = call(shape, size)
    is_plain = calls.runs_eagerly(given, lambda times: plain_bytes * times <= ROOM)
    if is_plain:
        calls.note_plain(given)
    else:
        calls.note_planned(given, is_new=True)
    return is_plain


def test_after_six_new_calls_in_a_row_a_seventh_runs_plainly() -> None:
    calls = NewCalls()
    assert [decided(calls, f"{n}", 8) for n in range(8)] == [False] * 6 + [True] * 2


def test_a_shape_that_comes_again_is_planned() -> None:
    calls = NewCalls()
    assert [decided(calls, f"{n}", 8) for n in range(7)][-1]
    assert not decided(calls, "6", 8)
    assert not decided(calls, "0", 8)


def test_a_shape_with_another_plan_each_time_runs_plainly() -> None:
    calls = NewCalls()
    assert [decided(calls, "same", 8) for _ in range(8)] == [False] * 6 + [True] * 2


def test_a_plan_that_serves_again_restarts_the_count() -> None:
    calls = NewCalls()
    for n in range(5):
        assert not decided(calls, f"{n}", 8)
    calls.note_planned(call("4", 8), is_new=False)
    assert not any(decided(calls, f"{n}", 8) for n in range(5, 11))


@pytest.mark.parametrize(("size", "is_plain"), [(8, True), (24, True), (28, False)])
def test_it_has_to_fit_with_the_square_of_its_growth(size: int, is_plain: bool) -> None:
    calls = NewCalls()
    for n in range(6):
        decided(calls, f"{n}", 8)
    assert decided(calls, "larger", size) == is_plain


class Ragged(nn.Module):
    """Runs other layers in each step, or gets inputs of other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.active = tuple(range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.active:
            x = torch.tanh(self.layers[number](x))
        return x.square().mean()


@pytest.mark.parametrize("by_layers", [False, True], ids=["sizes", "layers"])
def test_steps_that_never_repeat_have_plain_bits_and_stop_being_planned(
    by_layers: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    def trained(model: Ragged) -> list[torch.Tensor]:
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(12):
            if by_layers:
                model.active = tuple(n for n in range(6) if 20 + 3 * step >> n & 1)
            loss = model(torch.randn(16 if by_layers else 64 - step, 16))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return list(model.parameters())

    plain = Ragged()
    model = tightfit.fit(copy.deepcopy(plain), "64MiB", costs="unit", cache=False)
    assert all(map(torch.equal, trained(model), trained(plain)))
    assert "a call of new sizes or branches" in tightfit.report(model).outside
    assert capfd.readouterr().err.count("new sizes or branches") == 1


def test_without_an_allocator_that_refuses_every_call_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tightfit.session.fitted.refuses", lambda account: False)
    model = tightfit.fit(Ragged(), "64MiB", costs="unit", cache=False)
    for rows in range(1, 10):
        model(torch.randn(rows, 16)).backward()
    assert not tightfit.report(model).outside
