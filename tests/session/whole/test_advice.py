"""The advised budget has room to compare alternatives, with the memory that is held by then."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.handed import LayerCalls
from tightfit.allocator import CpuMeter
from tightfit.errors import InfeasibleBudget
from tightfit.session.memory.account import Account
from tightfit.session.options import make_options
from tightfit.session.whole.advice import OpenCalls, advised, needed_by_steps
from tightfit.session.whole.optimistic import less_expected, surroundings_of

VALUE = 4 * 1024 * 64  # bytes of each value of the step
ROWS, WIDTH, NUMBER = 1024, 64, 64
WEIGHTS = 4 * (WIDTH * WIDTH + WIDTH)
CONSTANTS = VALUE + WEIGHTS + NUMBER  # the input, the layer, the gradient of the loss
TIGHT = 1 << 17  # a budget in which nothing fits


def squares(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    return (F.gelu(F.linear(x, weight, bias)).square().sum(),)


class TooTight:
    """A step whose alternatives the budget has no room to compare, before its first call.

    With them a plan takes two values, without them three. The optimizer's state is to come.
    """

    def __init__(self) -> None:
        layer = nn.Linear(WIDTH, WIDTH)
        self.options = make_options(TIGHT, costs="unit", cache=False, limits=(0.5, 0.01))
        calls = LayerCalls(layer, self.options, squares)
        self.spec = calls.capture(ROWS)
        priced = self.spec.captured
        defaults = priced.keeping(lambda *_: False)
        self.spec.captured = dataclasses.replace(defaults, larger_budget_graph=priced.graph)
        self.optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
        self.account = Account({"model": layer}, self.optimizer)
        self.account.set_limit(1 << 30)
        self._inputs = calls.captures.inputs(self.spec, calls.given(ROWS))
        self.surroundings = surroundings_of(self.spec, self._inputs, self.account, self.options)

    def advised(self, needed_bytes: int, open_calls: OpenCalls) -> InfeasibleBudget:
        """Return the advice where the least plan without them needs so much."""
        held = self.account.held_at_call(self._inputs, (), self.spec.input_bytes)
        less = less_expected(self.spec, self.surroundings, self.account, held, self.options)
        error = InfeasibleBudget("none fits", budget_bytes=TIGHT, minimum_bytes=needed_bytes)
        return advised(error, self.spec, less, self.account, self.options, open_calls)


def compared_bytes() -> int:
    """Meter what comparing two ways takes: the gradient that is given, the input, the result."""
    meter = CpuMeter()
    begin_bytes = meter.live_bytes()
    x, gradient = torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH)
    result = torch.ops.aten.gelu_backward(gradient, x)
    taken_bytes = meter.live_bytes() - begin_bytes
    assert result.nbytes == VALUE and taken_bytes == 3 * VALUE
    return taken_bytes


def with_what_loops_keep(needed_bytes: int) -> int:
    return needed_bytes + needed_bytes // 200


def test_a_first_call_compares_while_the_optimizers_state_is_not_there_yet() -> None:
    step = TooTight()
    assert step.surroundings.state_bytes == WEIGHTS
    advice = step.advised(CONSTANTS + WEIGHTS + 3 * VALUE, OpenCalls(0))
    assert advice.minimum_bytes == with_what_loops_keep(CONSTANTS + compared_bytes())


def test_so_does_a_call_while_others_wait() -> None:
    step = TooTight()
    advice = step.advised(CONSTANTS + WEIGHTS + 3 * VALUE, OpenCalls(1))
    assert advice.call_bytes == CONSTANTS + compared_bytes()


def test_later_steps_compare_while_it_is_there() -> None:
    step = TooTight()
    needed_bytes = needed_by_steps(step.spec, step.surroundings, step.account, None)
    assert needed_bytes == with_what_loops_keep(CONSTANTS + WEIGHTS + compared_bytes())


def test_a_budget_that_was_enough_to_compare_them_is_no_advice() -> None:
    """That a plan with them was not found within it says that they do not help there."""
    step = TooTight()
    enough = dataclasses.replace(step.surroundings, budget_bytes=CONSTANTS + WEIGHTS + 3 * VALUE)
    needed_bytes = needed_by_steps(step.spec, enough, step.account, None)
    assert needed_bytes > with_what_loops_keep(CONSTANTS + WEIGHTS + compared_bytes())


def test_within_the_advised_budget_they_are_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    calls = LayerCalls(layer, make_options("1GiB", cache=False), squares)
    account = Account({"model": layer}, None)
    given = calls.given(ROWS)
    key = calls.captures.signature(given)
    call = calls.captures.traced_call(key, given)
    has_room = []
    for limit_bytes in (CONSTANTS + 2 * VALUE, CONSTANTS + compared_bytes()):
        monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path / f"{limit_bytes}"))
        account.set_limit(limit_bytes)
        account.enforce()
        room_bytes = limit_bytes - account.held_bytes()
        spec = calls.captures.capture(key, call, calls.options, 1, room_bytes)
        has_room.append(spec.captured.larger_budget_graph is None)
    assert has_room == [False, True]
