"""Rows of benchmarks, a line of JSON each in a file, and pages that are written from them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.files import write_atomically

__all__ = ["BenchmarkPage", "Row", "append_rows", "read_rows", "write_rows"]

Row = dict[str, Any]


def append_rows(path: Path, *rows: Row) -> None:
    """Append rows to a file."""
    with path.open("ab") as file:
        file.write(_encoded(rows))


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace a file by rows."""
    write_atomically(path, _encoded(rows))


def _encoded(rows: Iterable[Row]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file; none if it does not exist."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@dataclass(frozen=True)
class BenchmarkPage:
    """A page of the documentation in Markdown, and the rows that it is written from."""

    rows: Path
    page: Path
    document: Callable[[Sequence[Row]], str]

    def append(self, row: Row) -> None:
        """Append a row and print it."""
        append_rows(self.rows, row)
        print(row, flush=True)

    def read(self) -> list[Row]:
        """Return the rows."""
        return read_rows(self.rows)

    def main(
        self,
        description: str | None,
        measure: Callable[[], None],
        child: Callable[..., None] | None = None,
    ) -> None:
        """Measure everything anew and write the page; with ``--table`` only write the page.

        `measure` appends all rows. `child` is called instead with the words after ``--child``, in
        processes that the benchmark starts.
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
