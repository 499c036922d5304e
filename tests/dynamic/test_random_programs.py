"""Random programs, evicted at random: every bit is the one of plain PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

import pytest
import torch

import tightfit
from support.gpu_stand_in import RoomOnStandIn, stand_in
from tightfit.dynamic import region as region_module
from tightfit.dynamic.room import CallingRoom, RetryingRoom, allocated_bytes, storages_alive
from tightfit.errors import BudgetExceeded

Step = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor | None]

MAKING: tuple[Step, ...] = (
    lambda a, b, n: a + b,
    lambda a, b, n: (a @ b.t() @ b).tanh(),
    lambda a, b, n: torch.dropout(a, 0.5, True),
    lambda a, b, n: torch.empty(4, 6).copy_(a),
    lambda a, b, n: torch.empty(4, 6).fill_(n),
    lambda a, b, n: torch.cat([a[:2], b[2:]]),
    lambda a, b, n: a.t().reshape(4, 6),
    lambda a, b, n: torch.stack(a.unbind()).cos(),
    lambda a, b, n: a[:],
    lambda a, b, n: torch.where(a > 0, a, b),
    lambda a, b, n: torch.sub(a, b, out=torch.empty(0)),
    lambda a, b, n: a.clone().index_put_((torch.tensor([n]),), torch.tensor(1.5)),
    lambda a, b, n: torch.rand_like(a) * torch.randperm(6),
    lambda a, b, n: (a.cumsum(0) / 4).add_(torch.eye(4, 6).to_sparse()),
)
CHANGING: tuple[Step, ...] = (
    lambda a, b, n: a.add_(b.clone()),
    lambda a, b, n: a.mul_(0.5),
    lambda a, b, n: a[n].copy_(b[n - 1].clone()),
    lambda a, b, n: a[:, n].copy_(b[:, n + 1].clone()),
    lambda a, b, n: a.copy_(b.sin()),
    lambda a, b, n: a.zero_(),
    lambda a, b, n: a.uniform_(),
    lambda a, b, n: torch._foreach_add_([a], 0.25),
)


def run(seed: int, between: Callable[[random.Random], None]) -> list[torch.Tensor]:
    """Run a program; return what it holds at its end, and the random state."""
    choose, evict = random.Random(seed), random.Random(seed)
    torch.manual_seed(seed)
    held = [torch.randn(4, 6), torch.ones(4, 6)]
    for _ in range(50):
        a, b, n = choose.choice(held), choose.choice(held), choose.randrange(4)
        if choose.random() < 0.6:
            made = choose.choice(MAKING)(a, b, n)
            assert made is not None
            held.append(made)
        else:
            choose.choice(CHANGING)(a, b, n)
        if len(held) > 7 or (len(held) > 2 and choose.random() < 0.15):
            del held[choose.randrange(len(held))]
        between(evict)
    return [*(tensor.clone() for tensor in held), torch.get_rng_state()]


@pytest.mark.parametrize("policy", ["improved_ancestors", "lru", "h_dtr_eq", "random"])
@pytest.mark.parametrize("core", ["auto", "Python"])
def test_random_programs(core: Literal["auto", "Python"], policy: str) -> None:
    for seed in range(5):
        expected = run(seed, lambda _: None)
        with tightfit.online(
            "1TiB", smallest=1, most_again=1e12, policy=policy, core=core
        ) as region:

            def between(evict: random.Random, region: tightfit.Online = region) -> None:
                if evict.random() < 0.6:
                    region.evict(evict.choice([100, 300, "1TiB"]))

            found = run(seed, between)
            assert all(map(torch.equal, found, expected)), seed
        assert region.report().rematerialisations > 0


@pytest.mark.parametrize("room", [CallingRoom, RetryingRoom, RoomOnStandIn])
def test_random_programs_in_little_memory(
    room: type[CallingRoom | RetryingRoom], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the allocator calls, and where it refuses: the bits, or an error with a name."""
    if room is RoomOnStandIn:
        stand_in(monkeypatch)
    monkeypatch.setattr(region_module, "room_on", room)
    refused: list[int] = []
    for seed in range(20):
        expected = run(seed, lambda _: None)
        for size in (30_000, 40_000, 50_000):
            before_bytes = sum(map(allocated_bytes, storages_alive()))
            region = tightfit.online(
                before_bytes + size, smallest=1, most_again=1e12, core="Python"
            )

            def between(evict: random.Random, region: tightfit.Online = region) -> None:
                if evict.random() < 0.6:
                    region.evict(evict.choice([100, 300, "1TiB"]))

            try:
                with region:
                    found = run(seed, between)
                    assert all(map(torch.equal, found, expected)), (seed, size)
                del found
            except BudgetExceeded:
                refused.append(seed)
            assert region.report().peak_bytes <= region.report().budget_bytes
    assert 0 < len(refused) < 40
