"""What code meets while it is traced."""

from __future__ import annotations

import copy

import torch
from torch import nn

import tightfit


class AsksWhatItHas(nn.Module):
    """Treats parameters otherwise than buffers, whatever they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("fixed", torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in (self.layer.weight, self.fixed):
            x = x @ weight if isinstance(weight, nn.Parameter) else x * weight.sum()
        return x.sum()


def test_stand_ins_of_parameters_are_instances_of_parameter() -> None:
    torch.manual_seed(0)
    plain = AsksWhatItHas()
    fitted = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    x = torch.randn(3, 4)
    assert torch.equal(plain(x), fitted(x))
