"""A fitted model's page: the plan that runs and what the last step held."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import tightfit
from support.browser import browser, opened
from tightfit.errors import BadInput


def trained() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tightfit.fit(model, "1MiB", optimizer=optimizer, costs="unit", limits=(0.5, 0.01))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(32, 64)).sum().backward()
        optimizer.step()
    return model


def test_a_fitted_model_writes_its_page(tmp_path: Path) -> None:
    report = tightfit.report(trained())
    assert isinstance(report, tightfit.Report)
    path = report.html(tmp_path / "page.html")
    text = path.read_text("utf-8").replace("\u00a0", " ")
    assert "Sequential within 1.00 MiB" in text
    assert report.measured_peak_bytes is not None
    assert f"measured to hold {report.measured_peak_bytes / 1024:.2f} KiB" in text
    with pytest.raises(BadInput, match=r"ends in \.html"):
        report.html(tmp_path / "page.txt")
    with pytest.raises(BadInput, match="does not exist"):
        report.html(tmp_path / "none" / "page.html")


class Sorted(nn.Module):
    """Sorts outside of PyTorch, beyond any tracer, between two blocks that can be planned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        order = numpy.argsort(x.detach().sum(1).numpy())
        return self.second(x[torch.from_numpy(order)])


def test_a_model_in_parts_writes_its_page(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Sorted()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    quick = {"costs": "unit", "limits": (0.5, 0.01), "cache": False}
    tightfit.fit(model, "1000KiB", optimizer=sgd, **quick)
    for _ in range(4):
        model(torch.ones(128, 64)).sum().backward()
        model.zero_grad()
    report = tightfit.report(model)
    assert sum(part.calls for part in report.parts) == report.calls and report.overhead > 0
    path = report.html(tmp_path / "page.html")
    assert path.stat().st_size < 100_000
    with browser() as running:
        for scheme, width in (("light", 1200), ("dark", 390)):
            with opened(running, path, scheme=scheme, width=width) as (page, errors):
                assert page.locator("#parts tbody tr").count() == len(report.parts)
                assert "planned one by one" in page.inner_text("main")
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
                page.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)
                assert not errors
