"""The committed page about online regions is that of its rows."""

from __future__ import annotations

import json

from benchmarks import online


def test_the_committed_page_is_that_of_the_committed_rows() -> None:
    rows = [json.loads(line) for line in online.RESULTS.read_text("utf-8").splitlines()]
    assert online.PAGE.read_text("utf-8") == online.document(rows) + "\n"
    assert all(row["within"] for row in rows if "within" in row)
    assert all(row["bitwise"] for row in rows if row.get("status") == "ok")
