"""Assignments by masks, whose backward selects by them: the same bits, all of it planned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from support.plainly import trained_and_compared
from tightfit.session.report import Report


def _assigned(net: Masked, y, x, mask):
    result = torch.zeros_like(y)
    result[mask] = y[mask] * 2
    return result


def _added(net: Masked, y, x, mask):
    y = y.clone()
    y[mask] += net.second(x)[mask]
    return y


def _put(net: Masked, y, x, mask):
    return y.index_put((mask,), net.second(x)[mask], accumulate=True)


def _columns(net: Masked, y, x, mask):
    y = y.clone()
    y[:, net.columns] = net.second(x)[:, :4]
    return y


def _with_a_number(net: Masked, y, x, mask):
    y = y.clone()
    y[mask, 3] = net.second(x)[mask, 2]
    return y


def _computed(net: Masked, y, x, mask):
    result = torch.zeros_like(y)
    high = y.sum(1) > 0
    result[high] = y[high] * 2
    return result


def _one_for_all(net: Masked, y, x, mask):
    y = y.clone()
    y[mask] = net.second.bias
    return y


def _one_added(net: Masked, y, x, mask):
    return y.index_put((mask,), net.second.bias[None], accumulate=True)


def _with_slices(net: Masked, y, x, mask):
    y = y.clone()
    y[None, mask, ..., 1:3] = net.second.bias[None, 1:3]
    return y


def _scattered(net: Masked, y, x, mask):
    return y.masked_scatter(mask[:, None].expand_as(y), net.second(x) * 3)


class Masked(nn.Module):
    """Changes what a mask selects of the output of a layer."""

    columns: torch.Tensor

    def __init__(self, change: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.change = change
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.columns = torch.arange(8) % 2 == 0  # no buffer, as adapters of large models have it

    def forward(self, x, mask):
        return self.second(self.change(self, self.first(x), x, mask)).square().mean()


def _trained(change: Callable[..., torch.Tensor]) -> Report:
    torch.manual_seed(0)
    masks = [torch.arange(6) % 3 > 0, torch.arange(6) % 3 > 0, torch.arange(6) > 3]
    return trained_and_compared(Masked(change), [(torch.randn(6, 8), mask) for mask in masks])


@pytest.mark.parametrize("change", [_columns, _scattered, _one_for_all, _one_added, _with_slices])
def test_what_a_mask_selects_may_be_assigned(change: Callable[..., torch.Tensor]) -> None:
    report = _trained(change)
    assert report.parts == () and not report.outside


@pytest.mark.parametrize("change", [_assigned, _added, _put, _with_a_number, _computed])
def test_what_a_mask_selects_may_be_read_too(change: Callable[..., torch.Tensor]) -> None:
    """Dynamo's graphs end where a mask selects, and are planned."""
    report = _trained(change)
    assert report.parts and [*report.outside] == ["the code where Dynamo ends a graph"]


class Same(nn.Module):
    """Asks whether two tensors are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x, other):
        y = self.first(x)
        return (y * 2 if torch.equal(x, other) else y.relu()).sum()


def test_a_forward_may_ask_whether_tensors_are_equal() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    assert trained_and_compared(Same(), [(x, x), (x, x + 1), (x, x.clone())]).parts
