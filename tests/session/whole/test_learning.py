"""Measured steps replace what was assumed of user code, if they were the model's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tightfit
from tightfit.execution.attach import attached
from tightfit.session.fitted import Fitted

ROWS, WIDTH = 256, 64
BLOCK = 4 * ROWS * WIDTH


def fitted() -> tuple[nn.Module, Fitted]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    tightfit.fit(model, "64MiB", costs="unit", cache=False)
    session = attached(model)
    assert isinstance(session, Fitted)
    return model, session


def train(model: nn.Module, blocks: int) -> None:
    """Take a step whose loss holds so many blocks at once in addition to the gradient."""
    output = model(torch.randn(ROWS, WIDTH))
    torch.empty(blocks * BLOCK, dtype=torch.uint8)
    output.backward(torch.ones_like(output))
    model.zero_grad()


def measured_bytes(session: Fitted) -> int | None:
    (spec,) = session.specialisations
    return spec.user_code.measured_bytes


def test_user_code_is_assumed_until_a_step_has_ended_and_then_as_it_was_measured() -> None:
    model, session = fitted()
    train(model, 5)
    (spec,) = session.specialisations
    assert measured_bytes(session) is None
    assert spec.user_code.planned_bytes == 3 * BLOCK
    train(model, 5)
    train(model, 5)
    assert measured_bytes(session) == 5 * BLOCK
    assert spec.user_code.planned_bytes == 3 * BLOCK  # plans that fit stay in use


def test_a_second_step_that_holds_more_counts_and_later_ones_do_not() -> None:
    model, session = fitted()
    for blocks in (5, 7, 9, 9):
        train(model, blocks)
    assert measured_bytes(session) == 7 * BLOCK


def test_nothing_is_learned_of_a_step_in_which_another_model_has_trained() -> None:
    (model, session), (other, _) = fitted(), fitted()
    output = model(torch.randn(ROWS, WIDTH))
    train(other, 20)
    output.backward(torch.ones_like(output))
    model.zero_grad()
    train(model, 5)
    assert measured_bytes(session) is None
    train(model, 5)
    assert measured_bytes(session) == 5 * BLOCK


def test_figures_of_other_plans_are_forgotten_with_the_guard() -> None:
    model, session = fitted()
    for _ in range(3):
        train(model, 5)
    assert session.guard is not None and session.guard.steps
    session.change_budget(32 << 20)
    assert session.guard is None or not session.guard.steps


@pytest.mark.parametrize("in_backward", [True, False])
def test_state_that_an_optimizer_makes_is_no_surplus_of_a_backward(in_backward: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    keywords = {"optimizer": optimizer, "update_in_backward": in_backward}
    tightfit.fit(model, "64MiB", costs="unit", cache=False, **keywords)
    for _ in range(4):
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    session = attached(model)
    assert isinstance(session, Fitted)
    (spec,) = session.specialisations
    assert spec.surplus_bytes < 4 * WIDTH * WIDTH  # one weight's state
