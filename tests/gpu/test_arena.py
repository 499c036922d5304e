"""Steps at planned addresses on a GPU: the allocator's rules, and what follows from them."""

from __future__ import annotations

import copy
import functools
import time

import pytest
import torch
from torch import nn

import tightfit
from tightfit.allocator.cuda_arena_memory import CudaArenaMemory
from tightfit.api.report import Report
from tightfit.arenas.fillers import FillerPlacement, placing_obstacle
from tightfit.layout.blocks import Block
from tightfit.layout.holes import script_of
from tightfit.torch_private.gpu.allocator_settings import divide_coarsely

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def fixed_segments() -> None:
    divide_coarsely()


def test_requests_can_be_led_on_this_release() -> None:
    assert placing_obstacle(functools.partial(CudaArenaMemory, device=device())) is None


def test_requests_find_their_places_a_thousand_times() -> None:
    """In the middle of the block, several of one size at once, whatever was split before."""
    sizes = [3 * MIB - 700, 7 * MIB, 7 * MIB, 2 * MIB, 30 * MIB, 1 * MIB + 512]
    blocks = [Block(n, 2 * (n // 2), 2 * (n // 2) + 1 + n, s) for n, s in enumerate(sizes)]
    script = script_of(blocks)
    memories: list[CudaArenaMemory] = []

    def memory_for(height_bytes: int) -> CudaArenaMemory:
        memories.append(CudaArenaMemory(height_bytes, device()))
        return memories[-1]

    placement = FillerPlacement(memory_for)
    for _ in range(1000):
        step, alive = placement.begin(script), {}
        for at in sorted({block.lower for block in blocks}):
            for block in [b for b in blocks if b.upper <= at]:
                alive.pop(block.id, None)
            step.turn(at // 2)
            for block in [b for b in blocks if b.lower == at]:
                alive[block.id] = torch.empty(block.size_bytes, dtype=torch.uint8, device=device())
                place = alive[block.id].data_ptr() - memories[0].address
                assert place == script.places[block.id]
        alive.clear()
        placement.end(step)
    assert placement.report.exact_steps == 1000
    assert memories[0].reserved_bytes == memories[0].height_bytes


def test_what_leading_a_request_costs() -> None:
    """Printed, for docs/arena.md: microseconds of the processor for each large request."""
    blocks = [Block(n, 2 * n, 2 * n + 5, (4 + n % 7) << 20) for n in range(200)]
    script = script_of(blocks)
    placement = FillerPlacement(functools.partial(CudaArenaMemory, device=device()))
    spent = 0.0
    for _ in range(20):
        alive = {}
        step = placement.begin(script)
        for block in blocks:
            for other in [b for b in blocks if b.upper <= block.lower]:
                alive.pop(other.id, None)
            began = time.perf_counter()
            step.turn(block.lower // 2)
            spent += time.perf_counter() - began
            alive[block.id] = torch.empty(block.size_bytes, dtype=torch.uint8, device=device())
        alive.clear()
        placement.end(step)
    print(f"leading a request costs {spent / 20 / len(blocks) * 1e6:.1f} us")
    assert placement.report.exact_steps == 20


def test_a_fitted_model_holds_what_its_layout_says() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.GELU())]
    plain = nn.Sequential(*layers).to(device())
    model = copy.deepcopy(plain)
    x = torch.randn(4096, 2048, device=device())

    def train(net: nn.Module) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(8):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(plain)  # before the budget holds for all of the process
    tightfit.fit(model, "600MiB", cache=False, arena=True)
    train(model)
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    report = tightfit.report(model)
    assert isinstance(report, Report) and report.arena is not None
    assert report.arena.exact_steps >= 4 and report.arena.fallbacks == 0
    for _ in range(50):
        model(x).square().mean().backward()
        model.zero_grad()
    later = tightfit.report(model).arena
    assert later is not None and later.exact_steps >= report.arena.exact_steps + 50
    assert later.fallbacks == 0
