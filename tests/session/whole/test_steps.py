"""Calls of a callable as planned steps: which await their backward, and what they may free."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.handed import LayerCalls, chain
from tightfit.allocator import CpuMeter
from tightfit.allocator.tally import free_for
from tightfit.errors import BadInput, InfeasibleBudget
from tightfit.session.default_addresses import DefaultAddresses
from tightfit.session.memory.account import Account
from tightfit.session.options import make_options
from tightfit.session.whole.optimistic import FitsEagerly
from tightfit.session.whole.steps import WholeSteps

CPU = torch.device("cpu")
BUDGET, ROWS = 1 << 20, 64
VALUE, WEIGHTS, NUMBER = 4 * ROWS * 32, 4 * (32 * 32 + 32), 64  # bytes
LEAST = WEIGHTS + VALUE + NUMBER + 4 * VALUE  # the input is there, and four values in the backward


def squashed(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    return (nn.functional.linear(x, weight, bias).tanh(),)


class Trained:
    """A layer whose calls are planned steps."""

    def __init__(
        self,
        budget_bytes: int = BUDGET,
        function: Callable[..., tuple[Tensor]] = chain,
        **keywords: Any,
    ) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(32, 32)
        keywords = {"costs": "unit", "cache": False, "limits": (0.5, 0.01), **keywords}
        self.options = make_options(budget_bytes, **keywords)
        self.calls = LayerCalls(self.layer, self.options, function)
        self.account = Account({"model": self.layer}, torch.optim.SGD(self.layer.parameters()))
        self.account.set_limit(budget_bytes)
        addresses = DefaultAddresses()
        self.steps = WholeSteps(self.calls.callee, self.options, self.account, addresses)

    def call(self) -> Tensor:
        return self.steps(self.calls.given(ROWS))[0]

    def plain(self) -> Tensor:
        return chain(torch.ones(ROWS, 32), self.layer.weight, self.layer.bias)[0]

    def gradients(self) -> list[Tensor]:
        """Return the gradients that there are, and clear them."""
        found = [p.grad for p in self.layer.parameters() if p.grad is not None]
        self.layer.zero_grad()
        return found


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) == 2 and all(map(torch.equal, found, expected))


def test_a_call_awaits_its_backward_and_trains_as_plain_pytorch() -> None:
    trained = Trained()
    expected = trained.plain()
    expected.sum().backward()
    gradients = trained.gradients()
    assert not trained.steps.is_used
    output = trained.call()
    assert torch.equal(output, expected)
    assert trained.steps.is_used and [run.is_open for run in trained.steps.waiting] == [True]
    output.sum().backward()
    assert trained.steps.waiting == [] and same(trained.gradients(), gradients)


def test_a_call_whose_outputs_are_gone_is_awaited_no_more() -> None:
    trained = Trained()
    first, second = trained.call(), trained.call()
    assert len(trained.steps.waiting) == 2
    del first
    assert len(trained.steps.waiting) == 1
    second.sum().backward()
    assert trained.steps.waiting == []


def test_a_further_backward_runs_the_call_once_more() -> None:
    trained = Trained()
    found = []
    for make in (trained.plain, trained.call):
        output = make()
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()
        found.append(trained.gradients())
    assert same(*found) and trained.steps.waiting == []


def test_the_peaks_of_a_step_are_those_of_the_allocator() -> None:
    trained, meter = Trained(), CpuMeter()
    trained.call().sum().backward()
    trained.layer.zero_grad()
    given, peaks = trained.calls.given(ROWS), list[int]()
    gc.collect()  # what the capture has left must not go amid the step
    meter.reset_peak()
    begin_bytes = meter.live_bytes()
    output = trained.steps(given)[0]
    peaks.append(meter.take_peak_bytes() - begin_bytes)
    torch.empty(8 * VALUE, dtype=torch.uint8)  # as code around the step may take
    loss = output.sum()
    peaks.append(meter.take_peak_bytes() - begin_bytes)
    loss.backward()
    peaks.append(meter.take_peak_bytes() - begin_bytes)
    step = trained.steps.close_step()
    assert step is not None and step.constant_bytes == WEIGHTS + VALUE
    assert [step.forward_bytes, step.between_bytes, step.backward_bytes] == peaks
    assert step.outside_bytes == 8 * VALUE


# -- plans --------------------------------------------------------------------------------------


def test_what_is_prepared_is_what_runs_and_nothing_has_run_before() -> None:
    trained = Trained()
    with pytest.raises(BadInput, match="nothing is planned yet"):
        trained.steps.report()
    trained.steps.prepare(trained.calls.given(ROWS))
    prepared = trained.steps.last
    assert prepared is not None and not trained.steps.is_used and not trained.gradients()
    assert trained.steps.report().planned_peak_bytes == prepared.outcome.peak_bytes
    output = trained.call()
    assert trained.steps.last is prepared and len(trained.steps.waiting) == 1
    del output


def test_the_smallest_budget_is_what_the_least_step_takes() -> None:
    trained = Trained()
    assert trained.steps.smallest_budget(trained.calls.given(ROWS)).found_bytes == LEAST


def test_where_no_plan_fits_the_error_says_so_before_anything_runs() -> None:
    trained = Trained(LEAST - 64)
    with pytest.raises(InfeasibleBudget) as refused:
        trained.steps.prepare(trained.calls.given(ROWS))
    assert (refused.value.minimum_bytes or 0) > LEAST
    with pytest.raises((InfeasibleBudget, FitsEagerly)):
        trained.call()
    assert not trained.steps.is_used and trained.steps.waiting == []


def test_plans_are_made_again_where_options_decide_on_them() -> None:
    trained = Trained()
    for _ in range(4):  # by then the code around it is known
        trained.call().sum().backward()
    before = trained.steps.last
    trained.steps.change_options(dataclasses.replace(trained.options, on_exceed="warn"))
    trained.call().sum().backward()
    assert trained.steps.last is before
    less_bytes = LEAST + 6 * VALUE
    trained.steps.change_options(dataclasses.replace(trained.options, budget_bytes=less_bytes))
    trained.call().sum().backward()
    after = trained.steps.last
    assert after is not None and after is not before
    assert after.outcome.peak_bytes <= less_bytes


def test_steps_of_another_shape_are_captured_besides_and_forgotten_together() -> None:
    trained = Trained()
    for rows in (ROWS, ROWS // 2, ROWS):
        trained.steps(trained.calls.given(rows))[0].sum().backward()
    assert len(trained.steps.captures) == 2
    assert len({run.state for run in trained.steps.runs}) <= 1
    trained.steps.capture_again()
    assert len(trained.steps.captures) == 0 and trained.steps.guard.device is None
    trained.call().sum().backward()
    assert len(trained.steps.captures) == 1


# -- saved tensors of calls that wait -----------------------------------------------------------


def test_saved_tensors_are_freed_as_far_as_needed_the_oldest_first() -> None:
    trained, meter = Trained(), CpuMeter()
    losses = [trained.plain().sum() for _ in range(3)]
    torch.stack(losses).sum().backward()
    expected = trained.gradients()
    outputs = [trained.call() for _ in range(3)]
    before_bytes = meter.live_bytes()
    assert free_for(1, CPU) == 4 * VALUE == before_bytes - meter.live_bytes()
    runs = trained.steps.waiting
    assert [run.freed_bytes for run in runs] == [4 * VALUE, None, None]
    assert free_for(4 * VALUE + 1, CPU) == 8 * VALUE
    assert [run.freed_bytes for run in runs] == [4 * VALUE] * 3
    assert free_for(1, CPU) == 0
    torch.stack([output.sum() for output in outputs]).sum().backward()
    assert same(trained.gradients(), expected)


def test_saved_tensors_that_outputs_hold_are_not_freed_for_nothing() -> None:
    """The backward of `tanh` reads its output."""
    trained = Trained(function=squashed)
    output = trained.call()
    assert free_for(1, CPU) == 0
    assert [run.freed_bytes for run in trained.steps.waiting] == [None]
    held = output.detach()
    output.sum().backward()
    gradients = trained.gradients()
    assert torch.equal(held, trained.steps(trained.calls.given(ROWS))[0])
    assert len(gradients) == 2


def test_a_request_has_room_that_saved_tensors_give_way_to() -> None:
    trained = Trained()
    output = trained.call()
    free_bytes = BUDGET - trained.account.held_bytes()
    more = torch.empty(free_bytes + 4 * VALUE, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="has no room"):
        torch.empty(1)
    assert trained.account.held_bytes() == BUDGET
    del more
    output.sum().backward()
    gradients = trained.gradients()
    trained.plain().sum().backward()
    assert same(gradients, trained.gradients())


def test_nothing_is_freed_where_the_addresses_of_a_step_are_planned() -> None:
    trained = Trained(arena=True)
    output = trained.call()
    assert trained.steps.repeatable == [] and free_for(1, CPU) == 0
    output.sum().backward()


# -- lifetimes ----------------------------------------------------------------------------------


def test_a_call_that_waits_does_not_keep_its_callable_alive() -> None:
    trained = Trained()
    output, layer, steps = trained.call(), trained.layer, weakref.ref(trained.steps)
    del trained
    gc.collect()
    assert steps() is None
    output.sum().backward()
    found = [p.grad for p in layer.parameters()]
    assert all(gradient is not None and bool(gradient.any()) for gradient in found)
