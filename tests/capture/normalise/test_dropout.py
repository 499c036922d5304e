"""Dropout has plain PyTorch's bits for every probability and precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tightfit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("probability", [0.1, 0.15, 0.42, 0.5, 0.76, 1.0])
def test_dropout_scales_as_plain_pytorch_does(probability: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(probability), nn.Linear(64, 64)).to(dtype)
    x = torch.randn(4, 8, dtype=dtype)
    step = tightfit.step(
        lambda x: model(x).square().sum(), modules=model, budget="1GiB", costs="unit", cache=False
    )
    results = []
    for function in (lambda x: model(x).square().sum(), step):
        torch.manual_seed(1)
        model.zero_grad()
        loss = function(x)
        loss.backward()
        grads = (p.grad for p in model.parameters())
        results.append([loss.detach(), torch.get_rng_state(), *grads])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
