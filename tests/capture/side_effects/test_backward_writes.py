"""Tensors of a forward that code of its backward changes: the bits and contents of plain PyTorch.

As in the feedback transformer of labmlai's annotated papers: the steps of a sequence share one
memory for keys, and one for their gradients, to which each step's backward adds.
"""

from __future__ import annotations

import enum
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tightfit


class Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, memory: Tensor, gradients: Tensor, last: Tensor, n: int) -> Tensor:
        ctx.gradients, ctx.n = gradients, n
        return memory[: n + 1]

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        ctx.gradients[: ctx.n + 1] += outputs[0]
        return None, None, ctx.gradients[ctx.n], None


class Keeps(enum.Enum):
    NOTHING = enum.auto()
    MADE = enum.auto()  # another in each forward
    REUSED = enum.auto()


class Feedback(nn.Module):
    gradients: Tensor | None = None

    def __init__(self, keeps: Keeps) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.keeps = keeps

    def forward(self, x: Tensor) -> Tensor:
        memory, gradients = x.new_zeros(3, *x.shape), self.gradients
        if gradients is None or self.keeps is not Keeps.REUSED:
            gradients = x.new_zeros(3, *x.shape)
        else:
            gradients.fill_(0.0)
        if self.keeps is not Keeps.NOTHING:
            self.gradients = gradients
        for n in range(3):
            x = self.layer(x)
            memory.data[n] = x.detach()
            x = x + Read.apply(memory, gradients, x, n).sum(0)
        return x


@pytest.mark.parametrize("keeps", Keeps)
def test_the_backward_changes_what_the_forward_made(
    keeps: Keeps, capsys: pytest.CaptureFixture[str]
) -> None:
    results = []
    for fitted in (False, True):
        torch.manual_seed(0)
        net = Feedback(keeps)
        if fitted:
            tightfit.fit(net, "64MiB", costs="unit", cache=False)
        for _ in range(3):
            net(torch.randn(2, 8)).square().sum().backward()
        kept = [] if net.gradients is None else [net.gradients]
        results.append([*(p.grad for p in net.parameters()), *kept])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    is_refused = "changes a tensor that the forward returns" in capsys.readouterr().err
    assert is_refused == (keeps is not Keeps.NOTHING)
