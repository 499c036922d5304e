"""A real browser for tests of pages: Debian's Chromium or the one that playwright installs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Errors(list[str]):
    """What a page complained of on its console, or threw."""

    def watch(self, page: Any) -> None:
        """Collect from now on."""
        page.on("console", lambda message: self.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.append(f"thrown: {error}"))
        page.on("request", self._note_request)

    def _note_request(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:")):
            self.append(f"fetched: {request.url}")


def chromium() -> str | None:
    """Return the path of a Chromium on this machine; None if there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


@contextmanager
def browser() -> Iterator[Any]:
    """Yield a browser without a window; the test is skipped where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = chromium()
    if path is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield running
        finally:
            running.close()


@contextmanager
def opened(running: Any, file: Path, *, scheme: str, width: int) -> Iterator[tuple[Any, Errors]]:
    """Yield a page in a theme and a width, drawn, and what it complained of."""
    context = running.new_context(
        color_scheme=scheme, viewport={"width": width, "height": 900}, has_touch=width < 500
    )
    context.set_default_timeout(120_000)  # machines that run tests are busy
    page, errors = context.new_page(), Errors()
    errors.watch(page)
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready=true]")
    try:
        yield page, errors
    finally:
        context.close()
