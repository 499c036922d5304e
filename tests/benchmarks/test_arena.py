"""The committed page about arenas is that of its rows."""

from __future__ import annotations

from benchmarks import arena


def test_the_committed_page_is_that_of_the_committed_rows() -> None:
    rows = arena.BENCHMARK_PAGE.read()
    assert arena.PAGE.read_text("utf-8") == arena.document(rows)
    held = [row for row in rows if row["kind"] == "memory"]
    plain = {row["model"]: row["parameters"] for row in held if row["way"] == "fit"}
    assert len(plain) >= 3
    for row in held:
        assert row["parameters"] == plain.get(row["model"], row["parameters"])
        assert row["way"] == "fit" or max(row["first_share"], row["share"]) <= 1.05
