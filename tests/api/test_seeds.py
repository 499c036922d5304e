"""Forwards that seed what they draw from: no plan could, so that they run as plain PyTorch does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tightfit
from support.plainly import trained_and_compared
from tightfit.errors import CaptureError

WAYS = ("seeds, then draws", "draws, then seeds", "seeds within fork_rng", "makes a generator")


class Seeding(nn.Module):
    """Two layers, dropout between them, and numbers from a seed."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first = nn.Linear(8, 8)
        self.second = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8))

    def forward(self, x):
        y = self.first(x)
        if self.way == "seeds, then draws":
            torch.manual_seed(3)
        elif self.way == "seeds within fork_rng":
            with torch.random.fork_rng():
                torch.manual_seed(3)
                y = y * torch.randn_like(y)
        elif self.way == "makes a generator":
            y = y * torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
        y = self.second(y).square().mean()
        if self.way == "draws, then seeds":
            torch.manual_seed(3)
        return y


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_that_seeds_is_not_planned_as_a_whole(way: str) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(4, 8),) for _ in range(3)]
    assert trained_and_compared(Seeding(way), batches).outside


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_seeds_cannot_be_prepared(way: str) -> None:
    fitted = tightfit.fit(Seeding(way), "10MiB")
    with pytest.raises(CaptureError, match=r"no single graph.*when it is trained"):
        tightfit.prepare(fitted, torch.randn(4, 8))
