"""``torch.compile(model, backend="tightfit")``: Dynamo's graphs run as plans within one budget."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tightfit.allocator import measure_peak
from tightfit.errors import BadInput, InfeasibleBudget

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo's own doing
]

OPTIONS: dict[str, Any] = {"costs": "unit", "cache": False, "limits": (1.0, 0.05)}


class Net(nn.Module):
    """Convolutions, BatchNorm, dropout; if asked, with a break between two graphs."""

    def __init__(self, is_broken: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2)
        )
        self.tail = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GELU())
        self.head = nn.Linear(16, 4)
        self.is_broken = is_broken

    def forward(self, x: Tensor) -> Tensor:
        """Return classes."""
        x = self.body(x)
        if self.is_broken:
            torch._dynamo.graph_break()
        return self.head(self.tail(x).mean((2, 3)))


def trained(model: nn.Module, function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Train, the third step adding to the second's gradients; return all that was computed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    results = []
    for seed in range(4):
        torch.manual_seed(seed)
        loss = function(torch.randn(8, 3, 16, 16)).square().mean()
        loss.backward()
        results.append(loss.detach())
        if seed != 1:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        results.append(function(torch.randn(8, 3, 16, 16)))
    return [*results, *model.state_dict().values()]


@pytest.mark.parametrize("is_broken", [False, True], ids=["one graph", "two graphs"])
def test_the_bits_of_plain_pytorch_within_the_budget(is_broken: bool) -> None:
    torch.manual_seed(0)
    model = Net(is_broken)
    plain = copy.deepcopy(model)
    options = {"budget": "1400KiB", **OPTIONS}
    compiled = torch.compile(model, backend="tightfit", options=options)
    for mine, reference in zip(trained(model, compiled), trained(plain, plain), strict=True):
        assert torch.equal(mine, reference)


def test_several_graphs_keep_to_one_budget(capsys: pytest.CaptureFixture[str]) -> None:
    """Less than plain PyTorch holds, and measured over the whole step."""
    torch.manual_seed(0)
    model, x = Net(True), torch.randn(8, 3, 16, 16)
    constants = sum(t.nbytes for t in (*model.state_dict().values(), x))
    peaks = []
    budget = 1000 << 10
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    compiled = torch.compile(
        model, backend="tightfit", options={"budget": budget, "optimizer": optimizer, **OPTIONS}
    )
    for function in (model, compiled):
        for _ in range(3):
            model.zero_grad()
            _, peak = measure_peak(lambda function=function: function(x).square().sum().backward())
            state = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
            optimizer.step()
        peaks.append(constants + state + peak.peak_bytes)
    assert peaks[1] <= budget < peaks[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (None, r"needs a budget.*options=\{\"budget\""),
        ({"budget": "8g"}, "'8g' has the unknown unit 'g'"),
        ({"budget": "8GiB", "speed": 1}, "unknown option 'speed'.*known: budget"),
        ({"budget": "device"}, "in bytes, not 'device'"),
        ({"budget": "8GiB", "exactness": "exact"}, "exactness 'exact'"),
    ],
    ids=["no budget", "malformed", "unknown option", "device", "exactness"],
)
def test_options_that_cannot_be_used(options: Any, message: str) -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="tightfit", options=options)
    with pytest.raises(BadInput, match=message):
        compiled(torch.randn(1, 2))


def test_a_mode_of_inductor_is_refused() -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="tightfit", mode="max-autotune")
    with pytest.raises(BadInput, match="mode='max-autotune' belongs to Inductor"):
        compiled(torch.randn(1, 2))


def test_too_small_a_budget_is_said_with_the_least() -> None:
    options = {"budget": 24 << 10, **OPTIONS}
    compiled = torch.compile(Net(False), backend="tightfit", options=options)
    with pytest.raises(InfeasibleBudget, match="a plan fits"):
        compiled(torch.randn(8, 3, 16, 16))


def test_other_sizes_and_frozen_graphs() -> None:
    """A second batch size, maybe dynamic, and a model without anything to train."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled = torch.compile(model, backend="tightfit", options={"budget": "1GiB", **OPTIONS})
    for size in (2, 3, 5):
        x = torch.randn(size, 4)
        assert torch.equal(compiled(x), model(x))
        compiled(x).sum().backward()
    model.requires_grad_(False)
    assert not compiled(torch.randn(7, 4)).requires_grad
