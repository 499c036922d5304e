"""The table of compiled steps comes from the rows, and the committed one is up to date."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.documents import with_section
from benchmarks.rows import read_rows


@pytest.fixture
def table() -> Any:
    from benchmarks import compile_table

    return compile_table


def row(way: str, date: str, **more: Any) -> dict[str, Any]:
    common = {"model": "mlp", "rounds": 7, "threads": 1, "load": 0.5, "device": "cpu"}
    return {**common, "torch": "2.13.0", "way": way, "date": date, **more}


def test_only_the_newest_run_counts(table: Any) -> None:
    measured = {"peak_bytes": 1 << 20, "ratio": 1.0, "time_ratio": 1.0, "difference": 0.0}
    ours = {**measured, "share": 0.5, "budget_bytes": 3 << 20, "overhead": 0.02, "compiled": False}
    rows = [
        row("eager", "2026-01-02", **measured),
        row("tightfit compiled", "2026-01-02", **ours),
        row("tightfit", "2026-01-02", share=0.25, budget_bytes=1 << 20, error="no plan"),
        row("eager", "2026-01-01", **{**measured, "time_ratio": 9.0}),
    ]
    lines = table.section_of(table.newest(rows)).splitlines()
    assert lines[2:5] == [
        "| MLP, 6 blocks | eager | 1.0 MiB | 1.000 | 1.00x |  | 0e+00 |",
        "|  | **tightfit compiled**, budget 3.0 MiB, ran operator by operator "
        "| 1.0 MiB | 1.000 | 1.00x | +2.0% | 0e+00 |",
        "|  | **tightfit**, budget 1.0 MiB | no plan | | | | |",
    ]


def test_the_document_is_up_to_date(table: Any) -> None:
    document = table.DOCUMENT.read_text()
    section = table.section_of(table.newest(read_rows(table.ROWS)))
    assert document == with_section(document, "measured", section)
