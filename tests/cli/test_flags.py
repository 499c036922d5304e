"""What PyTorch's flags would do to a model, side by side with tightfit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tightfit.cli import main

MODEL = """
import torch
from torch import nn

class GradientCheckpointingLayer(nn.Sequential):  # what transformers calls its blocks
    pass

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            GradientCheckpointingLayer(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh())
            for _ in range(8)
        )

    def gradient_checkpointing_enable(self):
        pass

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def make(batch=None):
    return Net(), nn.functional.mse_loss, (torch.randn(256, 64),), torch.randn(256, 64)
"""


WIDENING = """
import torch
from torch import nn

class Widening(nn.Module):  # its wide tensor is not kept for backward
    def forward(self, x):
        return torch.tanh((x.repeat(1, 8) + 1).unflatten(1, (8, -1)).sum(1))

def make(batch=None):
    model = nn.Sequential(nn.Linear(64, 64), Widening(), Widening())
    return model, nn.functional.mse_loss, (torch.randn(256, 64),), torch.randn(256, 64)
"""


def compared(tmp_path: Path, model: str, *words: str) -> None:
    (tmp_path / "net.py").write_text(model)
    limits = ("--time-limit", "1")
    assert main(["check", f"{tmp_path}/net.py:make", "--compare-flags", *limits, *words]) == 0


def test_flags_are_shown_with_plans_with_their_peaks_costs_and_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compared(tmp_path, MODEL, "--json")
    rows: dict[str, dict[str, Any]] = {
        row["way"]: row for row in json.loads(capsys.readouterr().out)["rows"]
    }
    plain, block = rows["nothing"], rows["checkpoint per block"]
    assert block["peak_bytes"] < plain["peak_bytes"]
    assert block["overhead"] > 0.1
    assert not block["bitwise"]
    assert block["note"].endswith("counts each batch twice")
    own = rows["gradient_checkpointing_enable()"]
    assert own["peak_bytes"] == block["peak_bytes"]
    assert rows["activation_memory_budget=0.5"]["bitwise"]
    for row in rows.values():
        assert row["raises_peak"] == ((row["peak_bytes"] or 0) > plain["peak_bytes"])
    planned = [row for way, row in rows.items() if way.startswith("tightfit")]
    assert len(planned) == 3 and all(row["bitwise"] for row in planned)


def test_a_flag_that_raises_the_peak_is_marked_and_so_is_a_budget_that_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compared(tmp_path, WIDENING)
    lines = capsys.readouterr().out.splitlines()
    (block,) = [line for line in lines if line.startswith("checkpoint per block")]
    assert re.search(r"RAISES THE PEAK by [\d.]+ KiB$", block)
    (least,) = [line for line in lines if line.startswith("tightfit, 40%")]
    assert "does not fit; --budget minimum" in least


def test_a_budget_with_compare_flags_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "zoo:vit", "--compare-flags", "--budget", "1GiB"]
    assert main(words) == 2
    assert "leave the budget out" in capsys.readouterr().err
