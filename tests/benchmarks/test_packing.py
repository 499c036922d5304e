"""The packing benchmark writes complete rows, and the committed page is that of its rows."""

from __future__ import annotations

from pathlib import Path

from benchmarks import packing
from tightfit.layout.blocks import Block
from tightfit.layout.io import save_blocks


def test_a_row_is_complete(tmp_path: Path) -> None:
    save_blocks([Block(0, 0, 2, 64), Block(1, 1, 3, 128)], tmp_path / "pair.csv")
    row = packing.measured(tmp_path / "pair.csv", "auto")
    assert row.pop("processor_s") >= 0
    assert row == {
        "trace": "pair",
        "blocks": 2,
        "packer": "auto",
        "height_bytes": 192,
        "lower_bound_bytes": 192,
        "proven_optimal": True,
    }


def test_the_committed_page_is_that_of_the_committed_rows() -> None:
    rows = packing.BENCHMARK_PAGE.read()
    assert packing.PAGE.read_text("utf-8") == packing.document(rows)
    default = [row for row in rows if row["packer"] == "auto"]
    assert default and all(row["height_bytes"] == row["lower_bound_bytes"] for row in default)
