"""Results own what they show: a loss one number, an embedding bag one place per index."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tightfit
from tightfit.api.prove import prove
from tightfit.session.handles import fitted_of
from tightfit.zoo import Example


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
    fitted_of(step).close_step()
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


def test_embedding_bags_take_what_is_planned() -> None:
    torch.manual_seed(0)

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.EmbeddingBag(50, 8, mode="mean")
            self.most = nn.EmbeddingBag(50, 8, mode="max")

        def forward(self, x: Tensor) -> Tensor:
            return (self.mean(x) * self.most(x)).sum()

    example = Example(Bags(), None, (torch.randint(0, 50, (64, 4)),), None)
    proof = prove(example, budget="1GiB", steps=2, rounds=0, costs="unit")
    assert proof.succeeded
    assert proof.measured_program_bytes == proof.planned_peak_bytes
