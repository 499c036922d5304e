"""The table of what a step takes of a processor is that of the committed rows."""

from __future__ import annotations

from benchmarks.documents import with_section
from benchmarks.rows import read_rows
from benchmarks.step_cost import PAGE, RESULTS, section


def test_the_table_is_written_from_the_rows() -> None:
    text = PAGE.read_text()
    assert with_section(text, "step cost", section(read_rows(RESULTS))) == text
