"""What the site takes from outside of ``docs/``: two files of the repository, and the commands.

Pages link to files outside ``docs/`` as one reads them in the repository. On the site such a link
leads to the page made of that file, and a folder of source code is named without a link.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from tightfit.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"\[([^\]]*)\]\(\.\./([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are no files of ``docs/``."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text("utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "reference/command-line.md", content=_commands()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Point links that leave ``docs/`` at pages of the site; name what has none."""
    if page.file.src_uri.count("/"):
        return markdown
    return LINK.sub(_inside, markdown)


def _inside(link: re.Match[str]) -> str:
    text, target, anchor = link.groups()
    page = PAGES.get(target)
    return text if page is None else f"[{text}]({page}{anchor or ''})"


def _commands() -> str:
    text = app.generate_docs(output_format="markdown", recursive=True)
    head, _, commands = text.partition("## tightfit demo")
    return f"# The command line\n\n{_epilogue()}\n\n## tightfit demo{commands}" if head else text


def _epilogue() -> str:
    return f"{app.help}\n\n{app.help_epilogue}"
