"""What a plan promises is what the allocator gives out, to the byte."""

from __future__ import annotations

import pytest
import torch

from support.layouts import OnePixel, TransposedNorm
from tightfit.studies.comparison import Comparison
from tightfit.zoo import Example

LOSS_GRADIENT_BYTES = 64  # counted the whole step, though a peak in the forward comes before it


@pytest.mark.parametrize(
    ("model", "shape"), [(TransposedNorm, (4, 24, 16)), (OnePixel, (4, 3, 6, 6))]
)
def test_layouts_and_sizes_are_those_of_kernels(model, shape):
    torch.manual_seed(0)
    example = Example(model().train(), None, (torch.randn(shape),), None)
    comparison = Comparison(example, steps=2, costs="unit", cache=False)
    for budget in (comparison.budget_of(0.95), comparison.smallest_budget().found_bytes):
        proof = comparison.at(budget, rounds=0)
        assert proof.bitwise and proof.holds
        off = proof.planned_peak_bytes - proof.measured_program_bytes
        assert off in (0, LOSS_GRADIENT_BYTES)
