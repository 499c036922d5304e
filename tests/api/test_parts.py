"""Models planned part by part: each check of `support.sharded` runs on two ranks."""

from __future__ import annotations

import copy
import gc

import torch
from torch import nn

import support.sharded
from support.processes import run_ranks
from tightfit.allocator import meter_for
from tightfit.api.ledger import Holding, Ledger, Mark
from tightfit.api.options import make_options
from tightfit.api.parts import Parts
from tightfit.execution.attach import attach


def test_sharded_parameters() -> None:
    assert run_ranks(support.sharded) == []


def holding(saved: int, forward: int, rise: int) -> Holding:
    return Holding(None, saved, 10, forward, rise, 1.0, 1.0)


def test_a_ledger_tells_the_peak_under_other_plans() -> None:
    """Two parts that save 100 each, 30 bytes of a loss between them and their backward."""
    old = holding(100, 150, 200)
    ledger = Ledger(
        calls=["a", "a"],
        holdings=[old, old],
        marks=[
            Mark("forward", 0, (), 0, 150),
            Mark("forward", 1, (0,), 110, 260),
            Mark("between", -1, (0, 1), 220, 250),
            Mark("backward", 1, (0,), 230, 435),  # 5 more than planned
            Mark("backward", 0, (), 130, 330),
            Mark("between", -1, (), 20, 9999),  # the optimizer's step depends on no plan
        ],
    )
    assert ledger.peak_bytes == 9999 and ledger.peak_with({}) == 435
    new = holding(40, 180, 250)
    assert ledger.peak_with({"a": new}) == 230 - 120 + 250 + 5
    room = ledger.room("a", {"a": 40}, 400)
    assert room == 400 - (230 - 100 - 60) - 5 + 10
    fitting = holding(40, room, room - 40 - 10)
    assert ledger.peak_with({"a": fitting}) == 400


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
    session = Parts(model, {**blocks, "sometimes": model.sometimes}, options)
    attach(model, session, lambda _: session)
    session.attach_parts()
    found, peak_bytes = train(model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert peak_bytes + lasting <= budget_bytes < eager_bytes + lasting
    report = session.report()
    assert report.overhead > 0
    # the first block's input needs no gradient, and so it is of a kind of its own
    assert {"blocks.0", "blocks.1"} <= set(report.plans) <= {"blocks.0", "blocks.1", "sometimes"}
    session.leave()
    assert "forward" not in model.blocks[0].__dict__
