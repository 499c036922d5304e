"""Opaque modules that return something else with other data: an input itself, or no gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tightfit
from support.releases import needs
from tightfit.errors import PlanMismatch
from tightfit.torch_private.releases import LEAVES


class Flipping(nn.Module):
    """Turns images round, or returns what it was given: by a draw, or by the values."""

    def __init__(self, share: float | None) -> None:
        super().__init__()
        self.share = share

    def forward(self, x):
        turns = torch.rand(()) < self.share if self.share is not None else x.sum() > 0
        return x.flip(-1) if turns else x


class Augmented(nn.Module):
    def __init__(self, share: float | None, *, overwrites: str = "") -> None:
        super().__init__()
        self.augment = tightfit.opaque(Flipping(share))
        self.layer = nn.Linear(8, 8)
        self.overwrites = overwrites

    def forward(self, x):
        x = x * 2
        y = self.augment(x)
        if self.overwrites:
            {"input": x, "output": y}[self.overwrites].mul_(3)
        return (self.layer(y) * x).square().mean()


class Matched(nn.Module):
    """Has a loss of what is matched, which is a number without a gradient where nothing is."""

    def forward(self, x, wanted):
        fits = wanted > 0
        return x.square().mean(), x[fits].sum() if bool(fits.any()) else torch.zeros(())


class Matching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.loss = tightfit.opaque(Matched())

    def forward(self, x, wanted):
        wanted = wanted * 1.0  # its values are not at hand when the loss is measured
        whole, matched = self.loss(self.second(self.first(x)), wanted)
        return whole + matched


def trained(model: nn.Module, batches, *, fits: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    optimizer = torch.optim.Adam(model.parameters())
    if fits:
        tightfit.fit(model, "8MiB", optimizer=optimizer, costs="unit")
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("share", [0.5, 0.02, 0.98, None])
def test_output_that_may_be_an_input_is_as_in_plain_training(share) -> None:
    generator = torch.Generator().manual_seed(1)
    signs = [1, 1, -1, 1, -1, -1, 1, -1]
    batches = [(sign * torch.rand(4, 8, generator=generator),) for sign in signs]
    plain = trained(Augmented(share), batches, fits=False)
    fitted = trained(Augmented(share), batches, fits=True)
    assert all(map(torch.equal, plain, fitted))


@needs(LEAVES)
@pytest.mark.parametrize("overwrites", ["input", "output"])
def test_output_that_may_be_an_input_is_refused_where_one_of_both_is_overwritten(
    overwrites,
) -> None:
    """Both would be changed, or one: as the data decide."""
    batches = [(torch.ones(4, 8),), (-torch.ones(4, 8),)]
    with pytest.raises(PlanMismatch, match=r"'augment' returned one of its inputs.*x\.clone"):
        trained(Augmented(None, overwrites=overwrites), batches, fits=True)


@needs(LEAVES)
def test_loss_without_a_gradient_for_some_data_is_as_in_plain_training(capsys) -> None:
    """A plan is made for the way that the data of a step go, also at once."""
    found = [1, 1, -1, 1, -1]
    batches = [(torch.rand(4, 8), torch.full((4, 8), float(each))) for each in found]
    plain = trained(Matching(), batches, fits=False)
    fitted = trained(Matching(), batches, fits=True)
    assert all(map(torch.equal, plain, fitted))
    assert "'loss' returned tensors of which others have a gradient" in capsys.readouterr().err
