"""Buffers that take another size in the first forward, as observers of quantisation do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import tightfit


class Observed(nn.Module):
    """Divides by the largest magnitudes it has seen, of which it learns how many there are."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("largest", torch.zeros(first))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        now = y.detach().abs().amax(0)
        before = now if self.largest.shape != now.shape else self.largest.lerp(now, 0.1)
        self.largest.resize_(now.shape).copy_(before)
        return (y / self.largest).tanh().square().sum()


@pytest.mark.parametrize("first", [0, 1])
def test_a_buffer_grows_in_the_first_forward(first: int) -> None:
    torch.manual_seed(0)
    plain = Observed(first)
    fitted = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    for _ in range(4):
        x = torch.randn(5, 6)
        losses = [each(x) for each in (plain, fitted)]
        assert torch.equal(*losses)
        for each, loss in zip((plain, fitted), losses, strict=True):
            each.zero_grad()
            loss.backward()
        assert torch.equal(plain.largest, fitted.largest)
        assert torch.equal(plain.layer.weight.grad, fitted.layer.weight.grad)
