"""What a forward leaves in attributes of its modules is there after every planned step, too."""

from __future__ import annotations

import copy

import torch

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
