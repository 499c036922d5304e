"""Models with given parts: each check of `support.sharded` runs on two ranks."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import support.sharded
from support.processes import run_ranks
from tightfit.allocator import meter_for
from tightfit.session.handles import attach_by_parts
from tightfit.session.options import make_options


@pytest.mark.slow
def test_sharded_parameters() -> None:
    assert run_ranks(support.sharded) == []


class Dilated(nn.Module):
    """Parameters and outputs of the same shapes, other results."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        size = dilation, dilation
        self.body = nn.Sequential(nn.Conv2d(2, 2, 3, padding=size, dilation=size), nn.Tanh())
        self.scales = [float(dilation)]

    def forward(self, x):
        return self.body(x) * self.scales[0]


class Branching(nn.Module):
    """Data decide in the outermost forward, its blocks are alike; one block may not run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 32))
            for _ in range(3)
        )
        self.sometimes = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        if x.sum().item() > 0:
            x = self.sometimes(x)
        return x


def train(model: nn.Module) -> tuple[list[torch.Tensor], int]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    gc.collect()
    meter = meter_for("cpu")
    begin, found = meter.live_bytes(), []
    for step in range(6):
        torch.manual_seed(step)
        loss = model(torch.randn(256, 32)).square().mean()
        loss.backward()
        found.append(loss.detach())
        del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return found + list(model.state_dict().values()), meter.peak_bytes() - begin


def test_parts_of_a_model_in_one_process() -> None:
    torch.manual_seed(0)
    plain = Branching()
    model = copy.deepcopy(plain)
    lasting = sum(t.nbytes for t in (*plain.parameters(), *plain.buffers()))
    expected, eager_bytes = train(plain)
    budget_bytes = lasting + round(0.7 * eager_bytes)
    options = make_options(budget_bytes, costs="unit", limits=(1, 0.02), cache=False)
    blocks = {f"blocks.{i}": block for i, block in enumerate(model.blocks)}
    fitted = attach_by_parts(model, {**blocks, "sometimes": model.sometimes}, options)
    found, peak_bytes = train(model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert peak_bytes + lasting <= budget_bytes < eager_bytes + lasting
    fitted.settle()
    report = fitted.report()
    assert report.overhead > 0
    # the first block's input needs no gradient, and so it is of a kind of its own
    assert {"blocks.0", "blocks.1"} <= set(report.plans) <= {"blocks.0", "blocks.1", "sometimes"}
    fitted.leave()
    assert "forward" not in model.blocks[0].__dict__


def test_parts_that_differ_in_an_attribute_only() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Dilated(1), Dilated(2), Dilated(1))
    plain[2].scales = [3.0]
    model = copy.deepcopy(plain)
    options = make_options("1GiB", costs="unit", limits=(1, 0.02), cache=False)
    fitted = attach_by_parts(model, dict(model.named_children()), options)
    x = torch.randn(2, 2, 8, 8, requires_grad=True)
    for each in (plain, model):
        each(x).sum().backward()
    gradients = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in gradients)
    fitted.settle()
    assert len(fitted.report().plans) == 3
