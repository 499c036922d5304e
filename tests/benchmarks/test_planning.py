"""The planning benchmark writes complete rows, and the committed page is that of its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def test_a_chain_is_planned_and_its_row_is_complete(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from benchmarks import planning

    path = tmp_path / "rows.jsonl"
    words = ["--chain", "100", "--ratios", "0.6", "--iterations", "20", "--json", str(path)]
    monkeypatch.setattr("sys.argv", ["planning.py", *words])
    planning.main()
    (row,) = map(json.loads, path.read_text().splitlines())
    assert row.keys() >= set(planning.COLUMNS)
    assert row["overhead_percent"] >= row["bound_percent"] - 0.01 > 0
    assert 50 < row["n"] < 150


def test_a_cell_of_the_monet_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks import monet_budgets, planning_tables

    row = {"graph": "unet", "budget_gib": 6, "status": "optimal", "overhead": 0.05, "gap": 0.0003}
    row |= {"seconds_to_gap": {"0.05": 0.11, "0.02": None}, "seconds": 9.9, "time_limit_s": 10.0}
    row |= {"load": 0.5}
    rows: list[dict[str, Any]] = [
        {**row, "ways": "noop", "status": "infeasible", "overhead": None, "gap": None},
        {**row, "ways": "all"},
    ]
    (tmp_path / monet_budgets.ROWS.name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    line = planning_tables.document(tmp_path).splitlines()[-1]
    assert line == (
        "| unet | 6 GiB | 0.031 / 0.031 | 0.002 / 0.003 | none (9.9) | - | 0.064 / 0.204 "
        "| 0.1 / - | 0.03 | 5.00 |"
    )


def test_the_committed_page_is_that_of_the_committed_rows() -> None:
    from benchmarks import planning_tables

    assert planning_tables.PAGE.read_text() == planning_tables.document(planning_tables.RESULTS)
