"""Progress is drawn on a terminal, nested, and gone afterwards; elsewhere it is printed."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tightfit.cli.console import TerminalProgress, terminal_progress
from tightfit.progress import PrintedProgress


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


def test_without_a_terminal_only_long_waits_are_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with terminal_progress() as progress:
        assert isinstance(progress, PrintedProgress)
        progress.start("plan")
        progress.update(1)
    assert capsys.readouterr().err == ""
