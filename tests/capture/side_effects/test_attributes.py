"""What a forward leaves in attributes of its modules is there after every planned step, too."""

from __future__ import annotations

import copy

import torch
from torch import nn

import tightfit
from support.writing import Watched
from tightfit.execution.attach import attached


def test_kept_tensors_take_part_in_the_loss() -> None:
    torch.manual_seed(0)
    plain = Watched()
    model = copy.deepcopy(plain)
    tightfit.fit(model, "1GiB", costs="unit", cache=False)
    for _ in range(4):
        x = torch.randn(6, 8)
        for each in (plain, model):
            each.zero_grad()
            (each(x).sum() + each.weights.square().sum()).backward()
        assert torch.equal(model.weights, plain.weights)
        assert all(map(torch.equal, model.heads, plain.heads))
        gradients = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in gradients)
    assert len(attached(model).specialisations) == 1


class Compared(nn.Module):
    """Keeps how far its input is from what it should be, as transfers of style do."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self.target = target

    def forward(self, x):
        self.loss = (x - self.target).square().mean()
        return x


def test_losses_kept_as_single_numbers() -> None:
    torch.manual_seed(0)
    losses = [Compared(torch.randn(6, 8)), Compared(torch.randn(6, 8))]
    plain = nn.Sequential(nn.Linear(8, 8), losses[0], nn.Tanh(), nn.Linear(8, 8), losses[1])
    model = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    for _ in range(4):
        x = torch.randn(6, 8)
        for each in (plain, model):
            each.zero_grad()
            each(x)
            (each[1].loss + each[4].loss).backward()
        assert torch.equal(model[4].loss, plain[4].loss)
        gradients = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in gradients)


def test_what_a_program_keeps_in_a_model_of_a_notebook_asks_for_no_new_plan() -> None:
    cell = """
class Player(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.rewards = nn.Linear(8, 8), []

    def forward(self, x):
        return self.linear(x).sum()
"""
    names = {"nn": nn, "__name__": "of_no_file"}
    exec(compile(cell, "<cell 1>", "exec"), names)
    model = tightfit.fit(names["Player"](), "1GiB", costs="unit", cache=False)
    for reward in (1.0, 2.0):
        model(torch.randn(4, 8)).backward()
        model.rewards.append(reward)
    assert len(attached(model).specialisations) == 1
