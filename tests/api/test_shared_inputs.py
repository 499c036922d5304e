"""Inputs that are one tensor, or a parameter, belong to another step than inputs that are not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tightfit


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(3, 4))

    def forward(self, x, y):
        return (self.inner(x).tanh() * y + self.weight).square().sum()


class Changing(Two):
    def forward(self, x, y):
        x.add_(1)
        return super().forward(x, y)


def gradients(model: nn.Module, calls: list[list[torch.Tensor]]) -> list[torch.Tensor | None]:
    found = []
    for inputs in calls:
        model.zero_grad()
        for x in inputs:
            x.grad = None
        model(*inputs).backward()
        found += [p.grad.clone() for p in (*model.parameters(), *inputs) if p.grad is not None]
    return found


@pytest.mark.parametrize("kind", [Two, Changing])
def test_shared_inputs_and_parameters_as_inputs_are_distinguished(kind: type) -> None:
    torch.manual_seed(0)
    model = kind()
    results = []
    for each in (copy.deepcopy(model), tightfit.fit(model, "1GiB", costs="unit")):
        torch.manual_seed(1)
        trained = kind is Two
        x, y = (torch.randn(3, 4, requires_grad=trained) for _ in range(2))
        calls = [[x, x], [x, y], [x, x]]
        if trained:
            calls += [[each.weight, y], [x, y], [each.weight, each.weight]]
        results.append(gradients(each, calls))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    "calls_on",
    [
        lambda both: [[both[:3], both[1:4]]],
        lambda both: [[both[:3].clone(), both[:3]], [both[:3], both[3:]]],
    ],
    ids=["overlapping", "apart"],
)
def test_an_input_changed_in_place_may_share_memory_with_another_one(calls_on) -> None:
    torch.manual_seed(0)
    model = Changing()
    found = []
    for each in (copy.deepcopy(model), tightfit.fit(model, "1GiB", costs="unit")):
        torch.manual_seed(1)
        both = torch.randn(6, 4)
        found.append([*gradients(each, calls_on(both)), both])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
