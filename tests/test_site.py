"""What the site shows is what runs: its Python as it stands, its commands as far as they parse."""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import tightfit
from support.documents import DOCS
from tightfit.cli.app import app

PAGES = sorted([DOCS / "index.md", *DOCS.glob("how-to/*.md"), *DOCS.glob("explanation/*.md")])
README = DOCS.parent / "README.md"


def blocks(page: Path, *languages: str) -> list[str]:
    return [
        "\n".join(
            line.strip() if line.startswith("   ") and lang == "sh" else line
            for line in text.splitlines()
        )
        for lang, text in re.findall(r"```(\w*)\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
        if lang in languages
    ]


EXAMPLES = [
    pytest.param(code, id=f"{page.stem}-{n}")
    for page in PAGES
    for n, code in enumerate(blocks(page, "python"))
]
COMMANDS = sorted(
    {
        line.partition("#")[0].strip()
        for page in (README, *DOCS.rglob("*.md"))
        for text in blocks(page, "sh", "")
        for line in text.splitlines()
        if line.strip().startswith("tightfit ")
    }
)


@pytest.mark.parametrize("code", EXAMPLES)
def test_example(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quick = functools.partial(tightfit.fit, costs="unit", limits=(1, 0.05))
    monkeypatch.setattr(tightfit, "fit", quick)
    names: dict[str, Any] = {"__name__": "example"}
    exec(code, names)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_parses(command: str) -> None:
    app.parse_args(shlex.split(command)[1:], exit_on_error=False, print_error=False)


def test_there_is_something_to_test() -> None:
    assert len(EXAMPLES) >= 6 and len(COMMANDS) >= 12
