"""Code that cites docs/search.md finds its section there, and the page names code that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tightfit"
PAGE = (ROOT / "docs" / "search.md").read_text("utf-8")

CITATION = re.compile(r'docs/search\.md,((?:\s|//|and|"[^"]+")+)')


def cited_sections() -> set[str]:
    """The sections that Python and C++ files cite, wherever their lines break."""
    paths = [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.[ch]pp")]
    texts = [path.read_text("utf-8") for path in paths]
    found = [name for text in texts for names in CITATION.findall(text) for name in quoted(names)]
    return {re.sub(r"\s+(// )?", " ", name) for name in found}


def quoted(text: str) -> list[str]:
    return re.findall(r'"([^"]+)"', text)


def test_every_section_that_is_cited_is_there() -> None:
    sections = set(re.findall(r"^## (.+)$", PAGE, re.MULTILINE))
    cited = cited_sections()
    assert len(cited) > 8
    assert cited <= sections


def test_the_code_that_is_named_is_there() -> None:
    lines = re.findall(r"^Code: .*$", PAGE, re.MULTILINE)
    named = [name for line in lines for name in re.findall(r"`([\w./]+)`", line)]
    folders = {"_core": SOURCE, "tests": ROOT}
    for name in named:
        folder = folders.get(name.split("/")[0], SOURCE / "planners")
        assert (folder / name).exists(), name
