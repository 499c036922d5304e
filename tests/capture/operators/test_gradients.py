"""Operators whose gradient a tracer computes otherwise than plain PyTorch: the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from support.plainly import trained_and_compared

WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "product": lambda x: x.prod(),
    "product of rows": lambda x: torch.prod(x, 1),
    "product of kept columns": lambda x: x.prod(dim=0, keepdim=True) * x,
    "product with zeros": lambda x: (x * (x > 0)).prod(1),
    "product in double precision": lambda x: torch.prod(x, -1, dtype=torch.float64),
    "sign": lambda x: torch.sgn(x) * 3,
    "sign among others": lambda x: torch.sgn(x) * x,
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
    batches = [(torch.randn(6, 5),) for _ in range(3)]
    assert trained_and_compared(Way(way), batches).parts == ()
