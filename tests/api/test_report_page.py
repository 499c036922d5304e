"""A fitted model's page: the plan that runs and what the last step held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tightfit
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
    text = path.read_text("utf-8")
    assert "Sequential within 1.00 MiB" in text
    assert report.measured_peak_bytes is not None
    assert f"measured to hold {report.measured_peak_bytes / 1024:.2f} KiB" in text
    with pytest.raises(BadInput, match=r"ends in \.html"):
        report.html(tmp_path / "page.txt")
    with pytest.raises(BadInput, match="does not exist"):
        report.html(tmp_path / "none" / "page.html")
