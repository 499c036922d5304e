"""What benchmarks that measure have in common: rows in a file, and a page written from them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Book", "Row"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Book:
    """The rows of a benchmark and its page.

    Parameters
    ----------
    rows : Path
        A line of JSON each.
    page : Path
        Markdown.
    document : callable
        Writes the page from rows.
    """

    rows: Path
    page: Path
    document: Callable[[Sequence[Row]], str]

    def append(self, row: Row) -> None:
        """Add a row and show it."""
        with self.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)

    def read(self) -> list[Row]:
        """Return the rows."""
        return [json.loads(line) for line in self.rows.read_text("utf-8").splitlines()]

    def main(
        self,
        description: str | None,
        measure: Callable[[], None],
        child: Callable[..., None] | None = None,
    ) -> None:
        """Measure everything anew and write the page; with ``--table`` only write the page.

        Parameters
        ----------
        description : str or None
            For ``--help``.
        measure : callable
            Appends all rows.
        child : callable, optional
            Called instead with the words after ``--child``, in processes that the benchmark
            itself starts.
        """
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--table", action="store_true", help="only write the page")
        parser.add_argument("--child", nargs="+", help="used by the benchmark itself")
        options = parser.parse_args()
        if options.child and child is not None:
            child(*options.child)
            return
        if not options.table:
            self.rows.write_text("")
            measure()
        self.page.write_text(self.document(self.read()))
