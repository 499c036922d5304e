"""Messages about checkpoints inside of a model."""

from __future__ import annotations

import pytest
from torch import Tensor, nn, randn
from torch.utils.checkpoint import checkpoint

import tightfit


class Checkpointed(nn.Module):
    """A layer with dropout in a checkpoint."""

    def __init__(self, keeps_state: bool) -> None:
        super().__init__()
        self.region = nn.Sequential(nn.Linear(8, 8), nn.Dropout())
        self.keeps_state = keeps_state

    def forward(self, x: Tensor) -> Tensor:
        keeps = self.keeps_state
        return checkpoint(self.region, x, use_reentrant=False, preserve_rng_state=keeps).sin()


@pytest.mark.parametrize("keeps_state", [True, False])
def test_other_draws_are_announced_only_where_they_are_asked_for(
    keeps_state: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tightfit.fit(Checkpointed(keeps_state), "1GiB", costs="unit", cache=False)
    model(randn(4, 8)).sum().backward()
    assert ("preserve_rng_state=False" in capsys.readouterr().err) != keeps_state
