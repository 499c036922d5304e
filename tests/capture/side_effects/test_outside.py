"""Tensors that belong to no module: all of them are found before a step is traced for its plan."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch import Tensor, nn

import tightfit
from tightfit.capture.trace import dry_run, numbers

TABLES = [torch.linspace(0, 1, 8) * n for n in range(5)]


class Tables(nn.Module):
    """Adds tensors of its file, one after the other; leaves one behind if told to."""

    def __init__(self, leaves: bool) -> None:
        super().__init__()
        self.layer, self.leaves = nn.Linear(8, 8), leaves

    def forward(self, x: Tensor) -> Tensor:
        for table in TABLES:
            x = self.layer(x).tanh() + table
        if self.leaves:
            self.last = x
        return x.square().mean()


def test_one_trace_finds_them_all() -> None:
    model = tightfit.fit(Tables(leaves=False), "1GiB", costs="unit", cache=False)
    with (
        patch.object(dry_run, "trace", wraps=dry_run.trace) as looks,
        patch.object(numbers, "trace", wraps=numbers.trace) as traces,
    ):
        model(torch.randn(4, 8)).backward()
    assert looks.call_count == 1
    assert traces.call_count <= 3  # until it meets one, beside what attributes hold, whole


def test_what_is_left_behind_is_found_with_them() -> None:
    torch.manual_seed(0)
    plain, model = Tables(leaves=True), Tables(leaves=True)
    model.load_state_dict(plain.state_dict())
    tightfit.fit(model, "1GiB", costs="unit", cache=False)
    for _ in range(2):
        x = torch.randn(4, 8)
        for each in (plain, model):
            each.zero_grad()
            each(x).backward()
        assert torch.equal(plain.last, model.last)
        assert torch.equal(plain.layer.weight.grad, model.layer.weight.grad)
