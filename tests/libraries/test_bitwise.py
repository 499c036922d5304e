"""Under each library a fitted model gives the bits of the plain one, inside the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from support.libraries import LIBRARIES, WARNINGS, Library
from tightfit.allocator import meter_for
from tightfit.execution.attach import attached

pytestmark = [pytest.mark.filterwarnings(*WARNINGS), pytest.mark.usefixtures("one_thread")]

SHARE = 0.85
"""Of what steps hold above the constants when every activation is kept."""


def run(library: Library, folder: Path, budget: Any = None) -> tuple[list[Any], list[Any], int]:
    """Return what a way of training yields, the sessions of what it fitted, and the most held."""
    fitted: list[nn.Module] = []
    meter = meter_for("cpu")

    def fit(model: nn.Module, optimizer: Any) -> nn.Module:
        if budget is not None:
            options = {"costs": "unit", "cache": False, "limits": (1, 0.05)}
            fitted.append(tightfit.fit(model, budget, optimizer=optimizer, **options))
        return model

    folder.mkdir()
    torch.manual_seed(0)
    before = meter.live_bytes()
    meter.reset_peak()
    found = [x.clone() if isinstance(x, torch.Tensor) else x for x in library.way(fit, folder)]
    return found, [attached(model) for model in fitted], meter.peak_bytes() - before


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_same_bits_inside_the_budget(library: Library, tmp_path: Path) -> None:
    for package in library.packages:
        pytest.importorskip(package)
    plain, _, most = run(library, tmp_path / "plain")
    _, sessions, _ = run(library, tmp_path / "roomy", "1GiB")
    steps = [step for session in sessions for step in session.guard.steps]
    constant = max(s.constant_bytes for s in steps)
    kept = max(s.peak_bytes for s in steps) - constant
    if any(session.is_in_parts for session in sessions):  # their first steps keep what they must
        kept = most - constant
    # no plan changes what evaluations and savings between the steps take, a few bytes aside
    between = max(s.constant_bytes + s.after_bytes for s in steps) + 4096
    # a whole step that exceeds it raises at the next call of the model
    budget = max(between, constant + round(SHARE * kept))
    found, sessions, _ = run(library, tmp_path / "tight", budget)
    assert all(session.guard.steps for session in sessions)
    for mine, reference in zip(found, plain, strict=True):
        if isinstance(reference, torch.Tensor):
            assert torch.equal(mine, reference)
        else:
            assert mine == reference


class Rearranging(nn.Module):
    """Turns axes with einops, which keeps what it knows by the class of the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rearrange = pytest.importorskip("einops").rearrange
        return rearrange(self.linear(x), "n (h d) -> h n d", h=2).square().mean()


def test_kinds_of_tensors_that_a_library_has_met_make_no_new_plan(capsys: Any) -> None:
    model = tightfit.fit(Rearranging(), "1GiB", costs="unit", cache=False)
    x = torch.randn(4, 8)
    model(x).backward()
    with torch.no_grad():
        model(x)  # the first plain tensor that einops sees, unless others have used it before
    model(x).backward()
    assert "planned again" not in capsys.readouterr().err
