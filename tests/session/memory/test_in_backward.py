"""Parameters that are stepped in backward: what a loop may do between two backwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tightfit.errors import BadInput, TightfitError
from tightfit.session.memory.in_backward import StepsInBackward


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def sgd(layer: nn.Linear) -> torch.optim.Optimizer:
    return torch.optim.SGD(layer.parameters(), lr=0.5)


def stepped(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> StepsInBackward:
    """Return the steps of an optimizer after a backward that has stepped one parameter."""
    steps = StepsInBackward(optimizer)
    steps.take(dict(layer.named_parameters()))
    steps.before_forward()
    steps.step(layer.weight, torch.ones_like(layer.weight))
    return steps


def test_a_parameter_is_stepped_once_and_keeps_no_gradient(layer: nn.Linear) -> None:
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    optimizer = sgd(layer)
    steps = stepped(layer, optimizer)
    optimizer.step()
    assert torch.equal(layer.weight, weight - 0.5) and torch.equal(layer.bias, bias)
    assert layer.weight.grad is None
    steps.before_forward()  # the loop has stepped: the next call may come


def test_a_second_call_before_the_optimizers_step_is_refused(layer: nn.Linear) -> None:
    steps = stepped(layer, sgd(layer))
    with pytest.raises(TightfitError, match="gradients cannot be accumulated"):
        steps.before_forward()


def test_settings_changed_behind_a_backward_are_refused_once(layer: nn.Linear) -> None:
    optimizer = sgd(layer)
    steps = stepped(layer, optimizer)
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(TightfitError, match="settings"):
        optimizer.step()
    steps.before_forward()


def test_gradients_that_no_step_would_see_are_refused(layer: nn.Linear) -> None:
    optimizer = sgd(layer)
    steps = stepped(layer, optimizer)
    layer.bias.grad = torch.ones_like(layer.bias)
    with pytest.raises(TightfitError, match="bias came from outside the plan"):
        optimizer.step()
    with pytest.raises(TightfitError, match=r"bias\.grad is there before backward"):
        steps.before_forward()


def test_parameters_are_held_weakly_and_may_not_leave_the_optimizer(layer: nn.Linear) -> None:
    optimizer = sgd(layer)
    steps = StepsInBackward(optimizer)
    steps.take(dict(layer.named_parameters()))
    assert steps.parameters == {id(layer.weight), id(layer.bias)}
    optimizer.param_groups[0]["params"] = [layer.weight]
    with pytest.raises(TightfitError, match="bias has left the optimizer"):
        steps.before_forward()
    layer.bias = nn.Parameter(torch.zeros(2))
    assert steps.parameters == {id(layer.weight)}


def test_hooks_on_gradients_are_refused(layer: nn.Linear) -> None:
    steps = StepsInBackward(sgd(layer))
    steps.take(dict(layer.named_parameters()))
    layer.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(TightfitError, match="has a hook on its gradient"):
        steps.before_forward()


def test_an_optimizer_that_needs_all_gradients_at_once_is_refused(layer: nn.Linear) -> None:
    with pytest.raises(BadInput):
        StepsInBackward(torch.optim.LBFGS(layer.parameters()))
