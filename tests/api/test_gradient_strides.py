"""Gradients that come to outputs with other strides than the outputs have: the same bits."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training_loops import Life, Run, live
from support.lives import assert_trained_alike

_STEPS = 4


class _Convolutions(nn.Module):
    """Alternatives of its backward overwrite gradients, and batch norm sums them up."""

    def __init__(self, *, is_transposed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(32, 32, 5, padding=2), nn.BatchNorm1d(32)) for _ in range(2)
        )
        self.is_transposed = is_transposed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(F.relu(layer(x)), 0.5, self.training)
        return x.transpose(1, 2) if self.is_transposed else x


class _InParts(_Convolutions):
    """The gradient of the first part comes from code outside of plans."""

    def __init__(self) -> None:
        super().__init__(is_transposed=False)
        self.last = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).transpose(1, 2)
        torch._dynamo.graph_break()
        return self.last(y.contiguous())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transposed output": lambda: _Convolutions(is_transposed=True),
    "plain output": lambda: _Convolutions(is_transposed=False),
    "in parts": _InParts,
}
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda y: y.contiguous().sin().square().mean(),
    "transposed": lambda y: y.transpose(1, 2).contiguous().sin().square().mean(),
    "batch last": lambda y: y.permute(1, 2, 0).contiguous().sin().square().mean(),
    "part of a larger": lambda y: torch.cat([y, y.detach() * 2], 1).sin().square().mean(),
    "expanded in part": lambda y: y.mean(1).square().sum(),
    "expanded": lambda y: y.sum(),
}


def _within(loop: Callable[[Run], None], budget_bytes: int) -> Life:
    gc.collect()
    return live(loop, Run(budget_bytes, steps=_STEPS, small=True, cache=False))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_plain_pytorch(model: str, loss: str) -> None:
    def loop(run: Run) -> None:
        net = MODELS[model]()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        run.fit(net, optimizer=optimizer)
        for _ in range(run.steps):
            run.step(LOSSES[loss](net(torch.randn(8, 32, 48))), optimizer)
        run.trained(net)

    gc.collect()
    plain = live(loop, Run(None, steps=_STEPS, small=True))
    assert_trained_alike(plain, _within(loop, 2 * plain.whole_bytes))
    tight = _within(loop, plain.whole_bytes * 4 // 5)
    for _ in range(4):
        if not tight.error:
            break
        assert tight.advised_bytes is not None
        tight = _within(loop, tight.advised_bytes)
    assert_trained_alike(plain, tight)
