"""Operators whose fake kernels say something else than their kernels do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from tightfit.capture.capture import capture
from tightfit.capture.traced_call import TracedCall
from tightfit.pricing.keys import key_of
from tightfit.pricing.price import measured_costs
from tightfit.pricing.quick import quick_costs
from tightfit.progress import SILENT

SECRET = 1234


def _define(name: str, seed: dict[str, Any], said: dict[str, Any], strides: tuple[int, int]) -> Any:
    """Define an operator that gives a doubled tensor, and a seed that its backward reads.

    Parameters
    ----------
    seed, said : dict
        Of which type the seed is and on which device, and what the fake kernel says of that.
    strides : tuple of int
        What the fake kernel says of the doubled tensor.
    """

    @torch.library.custom_op(f"tightfit_lying::{name}", mutates_args=())
    def lying(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = (2 * x).t().contiguous().t()
        return made, torch.full((3,), SECRET, **seed)

    @lying.register_fake
    def _(x):
        made = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
        return made, torch.empty(3, **said)

    @torch.library.custom_op(f"tightfit_lying::{name}_backward", mutates_args=())
    def backward(grad: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        if seed.device.type != "cpu" or seed.dtype != DTYPES[name]:
            raise TypeError("this would read where nothing is")
        if (seed != SECRET).any():
            raise TypeError("a seed that was not drawn")
        return 2 * grad.contiguous()

    @backward.register_fake
    def _(grad, seed):
        return torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)

    def keep(ctx, inputs, output):
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    def derive(ctx, grad, _):
        return backward(grad, *ctx.saved_tensors)

    lying.register_autograd(derive, setup_context=keep)
    return lying


ROWS, WIDTH = 6, 16
TRUE = (1, ROWS)
DTYPES = {
    "device": torch.int64,
    "dtype": torch.int64,
    "strides": torch.int64,
    "all": torch.int32,
    "none": torch.int64,
}
LONG = {"dtype": torch.int64}
LYING = {
    "device": _define("device", LONG, LONG | {"device": "cuda"}, TRUE),
    "dtype": _define("dtype", LONG, {"dtype": torch.float32}, TRUE),
    "strides": _define("strides", LONG, LONG, (WIDTH, 1)),
    "all": _define(
        "all", {"dtype": torch.int32}, {"dtype": torch.float64, "device": "cuda"}, (WIDTH, 1)
    ),
    "none": _define("none", LONG, LONG, TRUE),
}


class Model(nn.Module):
    def __init__(self, lie: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lie = lie

    def forward(self, x):
        return self.second(LYING[self.lie](self.first(x))[0].tanh()).square().mean()


def inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH)


@pytest.mark.parametrize("price", [measured_costs, quick_costs])
@pytest.mark.parametrize("lie", LYING)
def test_a_backward_is_measured_on_what_its_forward_made(
    lie: str, price: Any, tmp_path: Any
) -> None:
    """Given anything else it ends the process, or this test."""
    model = Model(lie)
    captured = capture(TracedCall(model, {"model": model}, (inputs(),), {}))
    target = f"tightfit_lying.{lie}_backward"
    assert any(target in op.target for op in captured.graph.ops)
    priced = price(captured, SILENT)
    keys = {key_of(c[0]) for c in priced.captured.calls}
    assert len(keys) > 4
    op = next(op for op in priced.captured.graph.ops if target in op.target)
    assert op.alternatives[0].variants[0].cost_s > 0


@pytest.mark.parametrize("lie", LYING)
def test_a_model_with_such_an_operator_trains_with_the_bits_of_plain_pytorch(lie: str) -> None:
    torch.manual_seed(0)
    plain = Model(lie)
    model = tightfit.fit(copy.deepcopy(plain), "64MiB", cache=False)
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            each(inputs()).backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_gradient_through_dropout_is_laid_out_as_the_kernel_lays_it_out() -> None:
    model = DropsWeights()
    captured = capture(TracedCall(model, {"model": model}, (torch.randn(8, 8, 2, 4),), {}))
    assert not measured_costs(captured, SILENT).strides


def test_a_product_with_a_number_is_laid_out_as_the_kernel_lays_it_out() -> None:
    model = nn.Linear(4, 4)

    def halved(x: torch.Tensor) -> torch.Tensor:
        return (model(x).as_strided((1, 8, 4), (1, 4, 1)) * 0.5).transpose(0, 1).tanh().sum()

    captured = capture(TracedCall(halved, {"model": model}, (torch.randn(8, 4),), {}))
    assert not measured_costs(captured, SILENT).strides


class DropsWeights(nn.Module):
    """An attention whose weights are dropped in an order other than that of its products."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(2, 4, 8, 3))

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        weights = nn.functional.dropout(scores * self.values.sum(), 0.5)
        return (weights.permute(2, 3, 0, 1) @ self.values).sum()
