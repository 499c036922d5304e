"""Hooks on what autograd saves for backward do what they do in plain PyTorch, and it is said."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import tightfit


def in_bfloat16() -> saved_tensors_hooks:
    return saved_tensors_hooks(
        lambda x: x.bfloat16() if x.is_floating_point() else x,
        lambda x: x.float() if x.is_floating_point() else x,
    )


class Block(nn.Module):
    """Its forward sets hooks, or none."""

    def __init__(self, hooks: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.hooks = hooks

    def forward(self, x: Tensor) -> Tensor:
        if self.hooks is None:
            return self.second(torch.tanh(self.first(x)))
        with self.hooks():
            return torch.tanh(x * x.sigmoid())


def gradients(model: nn.Module) -> list[Tensor | None]:
    torch.manual_seed(1)
    model.zero_grad()
    model(torch.randn(4, 8)).square().sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("hooks", [in_bfloat16, save_on_cpu])
def test_where_blocks_are_left_the_hooks_do_what_they_do_in_plain_pytorch(
    hooks: Callable[[], Any],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(hooks), Block())
    expected = gradients(copy.deepcopy(model))
    fitted = tightfit.fit(model, "1GiB", costs="unit", cache=False)
    for found, wanted in zip(gradients(fitted), expected, strict=True):
        assert found is wanted is None or torch.equal(found, wanted)


@pytest.mark.parametrize("hooks", [in_bfloat16, save_on_cpu])
def test_a_call_within_hooks_runs_as_it_is_also_when_its_plan_is_known(
    hooks: Callable[[], Any],
) -> None:
    torch.manual_seed(0)
    plain = Block()
    model = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    for _ in range(2):
        found = []
        for each in (model, plain):
            with hooks():
                found.append(gradients(each))
            found[-1] += gradients(each)
        assert all(map(torch.equal, *found))
    (around,) = tightfit.report(model).outside
    assert "hooks of saved tensors" in around
    with hooks(), torch.no_grad():
        model(torch.randn(4, 8))


def test_checkpoints_inside_keep_working() -> None:
    torch.manual_seed(0)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    model = Checkpointed()
    expected = gradients(copy.deepcopy(model))
    fitted = tightfit.fit(model, "1GiB", costs="unit", cache=False)
    assert all(torch.equal(a, b) for a, b in zip(gradients(fitted), expected, strict=True))
