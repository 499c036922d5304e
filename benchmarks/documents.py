"""Markdown of pages that benchmarks write: tables, and sections between two comments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

__all__ = ["table", "with_section"]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_section(text: str, name: str, section: str) -> str:
    """Return a text with a section replaced.

    It is between ``<!-- name: written by ... -->`` and ``<!-- end of name -->``.
    """
    pattern = rf"(<!-- {name}: written by \S+ -->\n).*(\n<!-- end of {name} -->)"
    found = re.search(pattern, text, re.DOTALL)
    if found is None:
        raise ValueError(f"the text has no section {name!r}")
    return f"{text[: found.end(1)]}{section}{text[found.start(2) :]}"
