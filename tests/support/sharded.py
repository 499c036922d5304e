"""One rank that trains a model sharded by FSDP2: ``python -m support.sharded RANK PORT``."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import tightfit
from support.processes import end_rank, in_group
from tightfit.allocator import meter_for
from tightfit.errors import BadInput, InfeasibleBudget
from tightfit.execution.attach import attached

WIDTH, DEPTH, BATCH = 32, 4, 256


class Block(nn.Module):
    """A residual block with much to recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.narrow(F.dropout(F.gelu(self.wide(self.norm(x)).tanh()), 0.1))


class Net(nn.Module):
    """Blocks between layers of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def sharded(**keywords: Any) -> nn.Module:
    """Return the model, its blocks and itself sharded."""
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block, **keywords)
    return fully_shard(model, **keywords)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train(
    rank: int, fit: Callable[..., Any], steps: int = 5, accumulate: int = 1, **keywords: Any
) -> tuple[list[torch.Tensor], nn.Module, int, int]:
    """Return losses and final parameters, the model, and peaks of the first and later steps."""
    gc.collect()
    meter = meter_for("cpu")
    begin = meter.live_bytes()
    model = sharded(**keywords)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    fit(model, optimizer)
    losses, peaks = [], []
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        meter.reset_peak()
        for micro in range(accumulate):
            model.set_requires_gradient_sync(micro == accumulate - 1)
            loss = model(batch(rank, step)).square().mean()
            loss.backward()
            losses.append(loss.detach().clone())
            del loss
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(meter.peak_bytes() - begin)
    state = [p.detach().to_local().clone() for p in model.parameters()]
    return [*losses, *state], model, peaks[0], max(peaks[1:])


def check_bits_and_peak(rank: int, share: float, **keywords: Any) -> None:
    """Train plainly and inside a share of the memory that takes; all ranks run one plan."""
    expected, _, _, eager_bytes = train(rank, lambda *_: None, **keywords)
    sizes = [0, 0]
    dist.all_gather_object(sizes, round(share * eager_bytes))
    budget_bytes = min(sizes)

    def fit(model: nn.Module, optimizer: Any) -> None:
        tightfit.fit(
            model, sizes[rank], optimizer=optimizer, costs="unit", cache=False, limits=(1, 0.02)
        )

    found, model, first_bytes, peak_bytes = train(rank, fit, **keywords)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), keywords
    assert max(first_bytes, peak_bytes) <= budget_bytes, (keywords, peak_bytes, budget_bytes)
    report = tightfit.report(model)
    assert report.overhead > 0 and len(report.plans) == 1 and report.calls % DEPTH == 0
    assert report.planned_peak_bytes <= budget_bytes
    late_bytes = attached(model).route.steps.plans.late_bytes
    assert report.measured_peak_bytes <= report.planned_peak_bytes + late_bytes, keywords
    assert report.measured_peak_bytes >= report.planned_peak_bytes - late_bytes, keywords
    plans: list[Any] = [None, None]
    dist.all_gather_object(plans, report.plans)
    assert plans[0] == plans[1]


def check_one_unit(rank: int) -> None:
    """A model sharded as a whole is one part."""
    losses = []
    for fitted in (False, True):
        torch.manual_seed(0)
        model = fully_shard(Block())
        if fitted:
            tightfit.fit(model, "1GiB", costs="unit", cache=False, limits=(1, 0.02))
        for step in range(3):
            torch.manual_seed(step)
            loss = model(batch(rank, step)).square().mean()
            loss.backward()
            losses.append(loss.detach())
    assert losses[:3] == losses[3:]
    assert tightfit.report(model).calls == 1
    tightfit.unfit(model)
    model(batch(rank, 0))


def check_refused(rank: int) -> None:
    """What cannot be planned is refused by name."""
    fit = {"budget": "1GiB", "costs": "unit"}
    with pytest.raises(BadInput, match="not the model itself"):
        tightfit.fit(nn.Sequential(fully_shard(nn.Linear(4, 4))), **fit)
    model = tightfit.fit(sharded(), **fit)
    with pytest.raises(BadInput, match="takes its first step"):
        tightfit.prepare(model, batch(rank, 0))
    with pytest.raises(BadInput, match="part of a fitted"):
        tightfit.fit(model.blocks[0], **fit)
    with pytest.raises(BadInput, match="unfit the model"):
        tightfit.unfit(model.blocks[0])


def check_outside(rank: int) -> None:
    """A layer whose tensors stay spread over the ranks runs outside of every plan, and right."""
    mesh = init_device_mesh("cpu", (2,))
    layer = nn.Linear(4, 4)
    for name, parameter in [*layer.named_parameters()]:
        spread = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        setattr(layer, name, nn.Parameter(spread))
    fitted = tightfit.fit(copy.deepcopy(layer), budget="1GiB", costs="unit")
    for _ in range(2):
        x = distribute_tensor(torch.randn(2, 4), mesh, [Replicate()])
        for each in (layer, fitted):
            each(x).square().sum().backward()
    for mine, plain in zip(fitted.parameters(), layer.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), plain.grad.to_local())
    with pytest.raises(BadInput, match=r"outside of every plan.*is a DTensor"):
        tightfit.report(fitted)


def check_too_little(rank: int) -> None:
    """A budget below what the parts need says how much they need."""
    gc.collect()  # what is freed later would look like another level of memory
    model = sharded()
    tightfit.fit(model, "700KiB", costs="unit", cache=False, limits=(1, 0.02), on_exceed="warn")
    with pytest.warns(UserWarning, match="in the backward of part 'blocks"):
        model(batch(rank, 0)).square().mean().backward()
        model.zero_grad()
        with pytest.raises(InfeasibleBudget, match=r"4 parts.*save least") as raised:
            model(batch(rank, 0))
    assert raised.value.minimum_bytes > 700 << 10


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

SHARDED: dict[str, Callable[[int], None]] = {
    "blocks and root sharded": lambda rank: check_bits_and_peak(rank, 0.6),
    "accumulation without reduction": lambda rank: check_bits_and_peak(rank, 0.7, accumulate=2),
    "parameters in bfloat16, kept after forward": lambda rank: check_bits_and_peak(
        rank, 0.7, mp_policy=HALF, reshard_after_forward=False
    ),
    "the model as one unit": check_one_unit,
}
"""What is tested with two ranks, by name: a row each of docs/features.md."""


def main(rank: int, port: int) -> None:
    """Run every check; the first failure ends the rank."""
    torch.set_num_threads(1)
    with in_group(rank, port):
        for check in (*SHARDED.values(), check_too_little, check_refused, check_outside):
            check(rank)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    end_rank()
