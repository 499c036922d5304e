"""Steps at planned addresses on a GPU: the allocator's rules, and what follows from them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tightfit
from tightfit.allocator.cuda_ground import CudaGround, why_not_placed
from tightfit.api.report import Report
from tightfit.arenas.steering import Steering
from tightfit.layout.blocks import Block
from tightfit.layout.holes import script_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_this_release_can_be_asked_for_places() -> None:
    assert why_not_placed(device()) is None


def test_requests_find_their_places_a_thousand_times() -> None:
    """In the middle of the block, several of one size at once, whatever was split before."""
    sizes = [3 * MIB - 700, 7 * MIB, 7 * MIB, 2 * MIB, 30 * MIB, 1 * MIB + 512]
    blocks = [Block(n, 2 * (n // 2), 2 * (n // 2) + 1 + n, s) for n, s in enumerate(sizes)]
    script = script_of(blocks)
    grounds: list[CudaGround] = []

    def ground_for(height_bytes: int) -> CudaGround:
        grounds.append(CudaGround(height_bytes, device()))
        return grounds[-1]

    steering = Steering(ground_for)
    for _ in range(1000):
        step, alive = steering.begin(script), {}
        for at in sorted({block.lower for block in blocks}):
            for block in [b for b in blocks if b.upper <= at]:
                alive.pop(block.id, None)
            step.turn(at // 2)
            for block in [b for b in blocks if b.lower == at]:
                alive[block.id] = torch.empty(block.size_bytes, dtype=torch.uint8, device=device())
                place = alive[block.id].data_ptr() - grounds[0].address
                assert place == script.places[block.id]
        alive.clear()
        steering.end(step)
    assert steering.report.exact_steps == 1000
    assert grounds[0].held_bytes == grounds[0].height_bytes


def test_a_fitted_model_holds_what_its_layout_says() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.GELU())]
    plain = nn.Sequential(*layers).to(device())
    model = copy.deepcopy(plain)
    tightfit.fit(model, "600MiB", cache=False, arena=True)
    x = torch.randn(4096, 2048, device=device())
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.01)
        for _ in range(8):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    report = tightfit.report(model)
    assert isinstance(report, Report) and report.arena is not None
    assert report.arena.exact_steps >= 4 and report.arena.fallbacks == 0
