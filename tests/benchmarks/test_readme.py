"""The README's table comes from the rows, and the committed one is up to date."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.documents import with_section
from support.pictures import points_in


@pytest.fixture
def readme() -> Any:
    from benchmarks import readme

    return readme


def row(way: str, date: str, **more: Any) -> dict[str, Any]:
    common = {"model": "resnet50", "settings": {}, "rounds": 7, "threads": 1, "load": 0.5}
    common |= {"device": "cpu", "torch": "2.13.0", "bitwise": True}
    return {**common, "way": way, "date": date, **more}


def test_only_the_newest_run_counts(readme: Any) -> None:
    measured = {"peak_bytes": 1 << 20, "ratio": 1.0, "time_ratio": 1.0}
    half = {"peak_bytes": 1 << 19, "ratio": 0.5, "time_ratio": 1.0625, "overhead": 0.06}
    rows = [
        row("eager", "2026-01-02", **measured),
        row("tightfit 0.5", "2026-01-02", **half, bound=0.05, budget_ratio=0.5),
        row("activation_memory_budget 0.5", "2026-01-02", error="RuntimeError: no"),
        row("eager", "2026-01-01", **{**measured, "time_ratio": 9.0}),
    ]
    runs = readme.newest_runs(rows)
    lines = readme.section_of(runs).splitlines()
    assert lines[2] == "| ResNet-50 | eager | 1 MiB | 1.000 | 1.00x |  | yes |"
    assert lines[3] == (
        "|  | **tightfit**, budget 50% | 0 MiB | 0.500 | 1.06x | +6.0% (+5.0%) | yes |"
    )
    assert lines[4] == "|  | activation_memory_budget 0.5 | RuntimeError | | | | |"
    assert points_in(readme.plot_of(runs).encode()) == {"plain PyTorch 0": 1, "tightfit 0": 1}


def test_the_committed_table_is_that_of_the_committed_rows(readme: Any) -> None:
    for page, section in ((readme.README, readme.short_section), (readme.DOCUMENT, readme.section)):
        text = page.read_text()
        assert with_section(text, "training", section()) == text
    assert readme.PLOT.read_text() == readme.plot_of(
        readme.newest_runs(readme.read_rows(readme.ROWS))
    )


def test_the_table_of_a_gpu_has_rows_that_may_be_compared(readme: Any) -> None:
    """Of one process at a time, in the allocator's usual setting, plain PyTorch once a model."""
    from benchmarks import gpu_table

    rows = gpu_table.rows()
    models = gpu_table.shown(rows)
    assert all(known[0]["way"] == "plain" for known in models.values())
    every = [row for known in models.values() for row in known]
    assert all(row["call"] > 1 and not row["conf"] for row in every)
    assert sum(row["way"] == "plain" for row in every) == len(models) == 5
    assert all(row["commit"] and row["device"] and row["torch"] for row in rows)
    picture = gpu_table.picture(rows)
    assert readme.GPU_PLOT.read_text() == picture
    assert points_in(picture.encode())["tightfit 0"] == 3
