"""A loss is one number, not a number in a storage with room for one per element."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tightfit


@pytest.mark.parametrize(
    "loss",
    [F.mse_loss, F.smooth_l1_loss, F.soft_margin_loss, F.binary_cross_entropy],
    ids=lambda loss: loss.__name__,
)
def test_a_reduced_loss_keeps_no_room_for_every_element(
    loss: Callable[[Tensor, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 512), nn.Sigmoid())
    x, target = torch.rand(64, 8), torch.rand(64, 512)

    def loss_of(x: Tensor, target: Tensor) -> Tensor:
        return loss(model(x), target)

    step = tightfit.step(
        loss_of,
        modules=model,
        budget="1GiB",
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        costs="unit",
        cache=False,
    )
    for function in (loss_of, step):
        model.zero_grad()
        result = function(x, target)
        result.backward()
        if function is loss_of:
            expected = [result.detach(), *(p.grad for p in model.parameters())]
    step._session.close_step()
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            [result.detach(), *(p.grad for p in model.parameters())], expected, strict=True
        )
    )
    assert result.untyped_storage().nbytes() == 4
    report = tightfit.report(step)
    assert report.measured is not None
    assert abs(report.measured.program_bytes - report.planned_peak_bytes) <= 128
