"""What tells one step from another."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

import tightfit


def test_functions_that_reuse_an_address_have_other_signatures() -> None:
    """Functions made again for every step get the address of the last but one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())

    class Bent(nn.Module):
        def forward(self, x):
            return self.bend(x)

    bent = model[1] = Bent()
    tightfit.fit(model, "1GiB", costs="unit", planner="greedy")
    for number in range(12):
        bent.bend = None
        bent.bend = functools.partial(F.leaky_relu, negative_slope=number / 10)
        x = torch.randn(3, 4)
        assert torch.equal(model(x), bent.bend(model[0](x)))
