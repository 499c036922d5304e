"""The benchmark of training runs to its end on a small model and writes complete rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch


@pytest.mark.usefixtures("short_mobilenet")
def test_rows(tmp_path: Path) -> None:
    from benchmarks.training import main

    threads = torch.get_num_threads()
    words = "mobilenet_v2 --batch 4 --size 64 --ratios 0.7 --rounds 1 --time-limit 1 --segments 4"
    try:
        main([*words.split(), "--min-cut", "0.5", "--output", str(tmp_path / "rows.jsonl")])
    finally:
        torch.set_num_threads(threads)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    eager, *others, ours = rows
    assert [row["way"] for row in rows] == [
        "eager",
        "checkpoint per block",
        "checkpoint_sequential, 4",
        "activation_memory_budget 0.5",
        "tightfit 0.7",
    ]
    assert eager["ratio"] == eager["time_ratio"] == 1.0 and eager["bitwise"]
    assert ours["bitwise"] and ours["ratio"] <= 0.7 and ours["bound"] <= ours["overhead"]
    assert all("error" in row or 0 < row["ratio"] <= 1 for row in others)
