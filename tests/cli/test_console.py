"""Progress is drawn on a terminal, nested, and gone afterwards; elsewhere there is silence."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tightfit.cli.console import TerminalProgress, terminal_progress
from tightfit.progress import SILENT


def test_tasks_nest_and_close_after_an_error() -> None:
    screen = io.StringIO()
    progress = TerminalProgress(Console(file=screen, force_terminal=True, width=100))
    with pytest.raises(KeyboardInterrupt):
        try:
            progress.start("plan", total=3)
            progress.start("search")
            progress.update(7, "best 1.2 %")
            progress.start("polish")
            raise KeyboardInterrupt
        finally:
            progress.close()
    text = screen.getvalue()
    assert "plan" in text
    assert "search" in text
    assert "best 1.2 %" in text


def test_without_a_terminal_there_is_silence() -> None:
    with terminal_progress() as progress:
        assert progress is SILENT
