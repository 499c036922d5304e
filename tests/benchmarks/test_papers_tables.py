"""The committed tables and pictures are those of the committed rows."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_writing_them_again_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.papers_tables import write_tables

    write_tables(ROOT / "benchmarks" / "results", tmp_path)
    written = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert Path("papers.md") in written
    for path in written:
        assert (tmp_path / path).read_bytes() == (ROOT / "docs" / path).read_bytes(), path
    committed = {path.name for path in (ROOT / "docs" / "papers").iterdir()}
    assert committed == {path.name for path in written if path.parent.name == "papers"}
