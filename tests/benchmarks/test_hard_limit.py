"""The committed page about the hard limit is that of its rows."""

from __future__ import annotations

from benchmarks import hard_limit


def test_the_committed_page_is_that_of_the_committed_rows() -> None:
    rows = hard_limit.BENCHMARK_PAGE.read()
    assert hard_limit.PAGE.read_text("utf-8") == hard_limit.document(rows)
    (long,) = (row for row in rows if row["kind"] == "long")
    assert long["live_growth_bytes"] == 0
