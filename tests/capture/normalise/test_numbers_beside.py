"""Numbers that a step holds are outside of what PyTorch's allocator has allocated."""

from __future__ import annotations

import pytest
import torch

from tightfit.allocator import meter_for
from tightfit.capture.normalise.rewriting import outside_allocator


@pytest.mark.parametrize(
    "constant",
    [
        torch.tensor(2.5),
        torch.tensor([1, 2, 3]),
        torch.tensor([True]),
        torch.tensor([1 + 2j]),
        torch.tensor([0.5], dtype=torch.bfloat16),
        torch.empty(1).fill_(3.0).expand(4, 5, 6),
        torch.arange(6.0)[1::2],
    ],
    ids=lambda x: f"{x.dtype} {tuple(x.shape)}",
)
def test_outside_constants_have_the_same_values(constant: torch.Tensor) -> None:
    found = outside_allocator(constant)
    assert torch.equal(found, constant)
    assert (found.dtype, found.stride()) == (constant.dtype, constant.stride())
    assert found.storage_offset() == constant.storage_offset()


def test_outside_constants_are_not_counted_by_the_allocator() -> None:
    meter = meter_for("cpu")
    number = torch.tensor(2.5)
    before = meter.live_bytes()
    found = outside_allocator(number)
    del number
    assert meter.live_bytes() < before
    assert found.item() == 2.5


@pytest.mark.parametrize(
    "constant",
    [torch.zeros(100), torch.zeros(0), torch.zeros(1, requires_grad=True), torch.nn.Parameter()],
    ids=["large", "empty", "with a gradient", "a parameter"],
)
def test_other_constants_stay_in_the_allocator(constant: torch.Tensor) -> None:
    assert outside_allocator(constant) is constant
