"""The benchmark of orders writes complete rows, and the committed page is that of its rows."""

from __future__ import annotations

from benchmarks import orders
from support.graphs import two_layers


def test_a_row_is_complete() -> None:
    row = orders.measured("two layers", two_layers())
    assert row.pop("processor_s") >= 0
    assert row == {
        "graph": "two layers",
        "ops": 7,
        "traced_bytes": 2500,
        "least_bytes": 2500,
        "floor_bytes": 2100,
        "height_bytes": 2624,
    }


def test_the_committed_page_is_that_of_the_committed_rows() -> None:
    rows = orders.BENCHMARK_PAGE.read()
    assert orders.PAGE.read_text("utf-8") == orders.document(rows)
    assert all(row["floor_bytes"] <= row["least_bytes"] <= row["traced_bytes"] for row in rows)
