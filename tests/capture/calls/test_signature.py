"""What a module's attributes are tells one step from another."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tightfit
from tightfit.capture.calls.signature import module_signature


def signature(value: Any) -> Any:
    module = nn.ReLU()
    module.attribute = value
    return module_signature({"model": module}, module)


@pytest.mark.parametrize(
    "before, after",
    [
        (0.1, 0.2),
        (torch.float32, torch.bfloat16),
        ([1, 2], [2, 1]),
        ({"a": [1, (2, None)]}, {"a": [1, (2, 0)]}),
        ({1, 2}, {1, 3}),
        (F.relu, F.gelu),
        (nn.ReLU, nn.GELU),
        (functools.partial(F.gelu, approximate="tanh"), functools.partial(F.gelu)),
    ],
)
def test_another_value_is_another_step(before: Any, after: Any) -> None:
    assert signature(before) == signature(before)
    assert hash(signature(before)) == hash(signature(before))
    assert signature(before) != signature(after)


def test_what_takes_the_address_of_something_else_is_not_that() -> None:
    """Functions made anew for every step lie where the last but one has lain."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())

    class Bent(nn.Module):
        def forward(self, x):
            return self.bend(x)

    bent = model[1] = Bent()
    tightfit.fit(model, "1GiB", costs="unit", planner="checkpoint_all")
    for number in range(12):
        bent.bend = None
        bent.bend = functools.partial(F.leaky_relu, negative_slope=number / 10)
        x = torch.randn(3, 4)
        assert torch.equal(model(x), bent.bend(model[0](x)))
