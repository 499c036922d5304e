"""Operators whose gradient a tracer computes otherwise than plain PyTorch: the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import tightfit

WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "product": lambda x: x.prod(),
    "product of rows": lambda x: torch.prod(x, 1),
    "product of kept columns": lambda x: x.prod(dim=0, keepdim=True) * x,
    "product with zeros": lambda x: (x * (x > 0)).prod(1),
    "product in double precision": lambda x: torch.prod(x, -1, dtype=torch.float64),
    "sign": lambda x: torch.sgn(x) * 3,
    "sign beside others": lambda x: torch.sgn(x) * x,
}


class Way(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = WAYS[way]
        self.weight = nn.Parameter(torch.randn(6, 5))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return self.way(self.weight * x + self.bias).sum() + self.bias.sum()


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_has_the_bits_of_plain_pytorch(way: str) -> None:
    torch.manual_seed(0)
    net = Way(way)
    plain = copy.deepcopy(net)
    fitted = tightfit.fit(net, "10MiB")
    for _ in range(3):
        x = torch.randn(6, 5)
        losses = [each(x) for each in (plain, fitted)]
        for each, loss in zip((plain, net), losses, strict=True):
            each.zero_grad()
            loss.backward()
        assert torch.equal(*losses)
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad.clone())
    assert tightfit.report(fitted).parts == ()
