"""An input that a forward changes in place is held once: the backward reads it there."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tightfit
from tightfit.allocator import meter_for

MIB = 1 << 20
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "and returned": F.relu_,
    "and viewed": lambda x: x.sigmoid_().view(-1),
    "and read": lambda x: x.tanh_().square().sum(1),
    "read before and after": lambda x: x.sum(0) + x.mul_(2).sin().sum(0),
    "by a column": lambda x: x.exp() * x.index_fill_(1, torch.tensor([3]), 0.5),
}


class Changing(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x)


def _trained(net: nn.Module) -> tuple[list[Tensor], int]:
    """Return gradients, and the bytes that a call has left to be held."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(512, 512))
    meter = meter_for(torch.device("cpu"))
    held, gradients = 0, list[Tensor]()
    for _ in range(3):
        gc.collect()
        before = meter.live_bytes()
        output = net(weight * 2)
        held = meter.live_bytes() - before
        output.sin().sum().backward()
        gradients.append(weight.grad.clone())  # type: ignore[union-attr]
        weight.grad = None
        del output
    return gradients, held


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_is_held_as_in_plain_pytorch(change: Callable[[Tensor], Tensor]) -> None:
    plain, plain_bytes = _trained(Changing(change))
    net = tightfit.fit(Changing(change), "64MiB", costs="unit", cache=False)
    fitted, fitted_bytes = _trained(net)
    assert all(map(torch.equal, plain, fitted))
    assert fitted_bytes <= plain_bytes + 4096


def test_a_copy_of_what_was_written_may_be_read_after_further_writes() -> None:
    """As spectral norm copies its vectors: what the backward reads is the copy."""

    def change(x: Tensor) -> Tensor:
        return x.mul_(2).clone().square()

    def gradient(net: nn.Module) -> Tensor:
        weight = torch.linspace(0, 1, 64, requires_grad=True)
        given = weight * 3
        output = net(given)
        with torch.no_grad():
            given.zero_()
        output.sum().backward()
        assert weight.grad is not None
        return weight.grad

    net = Changing(change)
    plain = gradient(net)
    fitted = tightfit.fit(net, "64MiB", costs="unit", cache=False)
    assert torch.equal(gradient(fitted), plain)
