"""What no plan can hold trains in a region that evicts: each refusal says so, and it is so."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
from torch import nn

import tightfit
from api.test_bitwise import assert_equal
from support.evicting import EvictEverything
from support.features import REFUSED, Refused, trained
from tightfit.dynamic.native.build import compiled_core
from tightfit.dynamic.native.compiling import CoreUnavailable
from tightfit.dynamic.room import allocated_bytes, storages_alive
from tightfit.errors import BudgetExceeded, InfeasibleBudget


@pytest.fixture(autouse=True, scope="module")
def core_is_compiled() -> None:
    """Let regions have the core in C++ from the first on, where it can be had."""
    with contextlib.suppress(CoreUnavailable):
        compiled_core()


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.name)
@pytest.mark.filterwarnings("ignore:hooks on module")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_refused_model_trains_in_a_region(refused: Refused) -> None:
    expected = trained(refused.run)
    assert expected
    with (
        tightfit.online("1TiB", smallest=1, most_again=1e9) as region,
        EvictEverything(region),
    ):
        found = trained(refused.run)
    assert_equal(found, expected)


class Scattered(nn.Module):
    """Decides by its values between its blocks, where most of its memory is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(2)
        )
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        for block in self.blocks:
            x = block(x) / (1 + float(x.detach().norm()))
            for _ in range(12):
                x = x.sin() * self.calls
        return x


def test_a_model_too_large_between_parts_trains_in_a_region_of_the_same_budget() -> None:
    def train(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        found = []
        for _ in range(3):
            loss = model(torch.randn(512, 64)).square().sum()
            loss.backward()
            found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
            model.zero_grad()
        return found

    torch.manual_seed(0)
    plain = Scattered()
    mine, fitted = copy.deepcopy(plain), copy.deepcopy(plain)
    expected = train(plain)
    with pytest.raises((BudgetExceeded, InfeasibleBudget), match=r"with tightfit\.online"):
        train(tightfit.fit(fitted, "2MiB", costs="unit"))
    del fitted
    gc.collect()
    before_bytes = sum(map(allocated_bytes, storages_alive()))
    with tightfit.online(before_bytes + (2 << 20)) as region:
        found = train(mine)
    assert region.report().rematerialisations > 0
    assert_equal(found, expected)
