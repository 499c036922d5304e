"""The runtime behind autograd: what it refuses rather than compute wrongly."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import tightfit
from tightfit.errors import TightfitError
from tightfit.execution.attach import attached
from tightfit.execution.lower import lower
from tightfit.execution.runtime import Runner
from tightfit.plan import Compute, assemble, keep_everything
from tightfit.plan.plan import Gradients
from tightfit.session.whole.specialisation import Planned


@torch.no_grad()
def descend(parameter: torch.Tensor) -> None:
    parameter.sub_(parameter.grad)


@pytest.mark.parametrize("gradients", ["fresh", "accumulated"])
def test_a_parameter_changed_inside_backward_is_not_read_again(gradients: Gradients) -> None:
    """An optimizer that steps inside backward must not reach what a recomputation still reads.

    A fresh gradient waits for that; one that goes into an existing one cannot, and is refused.
    """
    gc.collect()  # what another test has left would be collected while steps are measured
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    plain = copy.deepcopy(model)
    tightfit.fit(model, "1GiB", costs="unit")
    x = torch.randn(5, 8)
    model(x).square().sum().backward()
    shape = attached(model).specialisations[-1]
    for _ in range(4):
        model.zero_grad(set_to_none=gradients == "fresh")
        model(x).square().sum().backward()
    planned = list(shape.plans.values())[-1]
    assert planned.outcome.plan is not None and planned.outcome.plan.gradients == gradients
    last = [op for op in planned.graph.ops if op.target == "aten.addmm"][-1]
    plan = assemble(
        planned.graph,
        [*keep_everything(planned.graph), Compute(last.id)],
        budget_bytes=1 << 40,
        gradients=gradients,
        group_bytes=1,
    )
    runner = Runner(shape.captured, lower(shape.captured, plan))
    recomputing = Planned(planned.graph, planned.outcome, runner)
    for around in list(shape.plans):  # whatever the surroundings of the next call
        shape.add_plan(around, recomputing)
    for each in (model, plain):
        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(descend)
        each.zero_grad(set_to_none=gradients == "fresh")
    plain(x).square().sum().backward()
    loss = model(x).square().sum()
    assert attached(model).last is recomputing
    if gradients == "accumulated":
        with pytest.raises(TightfitError, match="changed during backward"):
            loss.backward()
    else:
        loss.backward()
        for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(own, expected)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x).tanh() + x.sigmoid()


@pytest.mark.parametrize("outside", ["later", "earlier", "none"])
def test_sums_that_code_outside_adds_to_in_another_order_are_announced(outside, capsys) -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    model = tightfit.fit(Twice(), "1GiB", costs="unit")
    for rows in (4, 4, 5):  # the last needs a plan of its own, and is not announced again
        x = first(torch.randn(rows, 8))
        earlier = last(x) if outside == "earlier" else 0
        output = model(x) + earlier
        if outside == "later":
            output = output + last(x)
        output.sum().backward()
    assert capsys.readouterr().err.count("is a sum") == (outside == "later")


class Reads(nn.Module):
    """Reads its input through several layers."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(times))

    def forward(self, x):
        return sum(layer(x).tanh() for layer in self.layers)


@pytest.mark.parametrize("times", [(1, 2, 1), (2, 1, 1), (3, 1, 2)])
def test_a_tensor_that_several_calls_read_has_the_gradient_of_plain_pytorch(times, capsys) -> None:
    """One term or several each, and what eager code between them adds: in its order."""
    torch.manual_seed(0)
    first, models = nn.Linear(16, 16), nn.ModuleList(Reads(n) for n in times)
    plain = copy.deepcopy((first, models))
    for model in models:
        tightfit.fit(model, "1GiB", costs="unit", cache=False)
    for _ in range(2):
        x = torch.randn(64, 16)
        gradients = []
        for layer, parts in ((first, models), plain):
            layer.zero_grad()
            h = layer(x)
            total = h
            for part in parts:
                total = part(h) + total.tanh()
            total.square().sum().backward()
            gradients.append(layer.weight.grad)
        assert torch.equal(*gradients)
    assert "is a sum" not in capsys.readouterr().err
