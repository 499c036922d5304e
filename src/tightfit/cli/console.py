"""Progress, drawn on a terminal or printed in lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bars

from tightfit.progress import Pace, PrintedProgress, Progress


class TerminalProgress:
    """Draws nested tasks on the error output."""

    def __init__(self, console: Console) -> None:
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
        )
        self._tasks: list[tuple[TaskID, Pace]] = []

    def start(
        self, title: str, total: int | None = None, *, at_most_s: float | None = None
    ) -> None:
        if not self._tasks:
            self._bars.start()
        indented = "  " * len(self._tasks) + title
        task = self._bars.add_task(indented, total=total, note="", left="")
        self._tasks.append((task, Pace(total, at_most_s)))

    def update(self, done: int, note: str = "") -> None:
        """Draw the state of the task that was started last."""
        if self._tasks:
            task, pace = self._tasks[-1]
            pace.reached(done)
            self._bars.update(task, completed=done, note=note, left=pace.remaining())

    def stop(self) -> None:
        if self._tasks:
            self._bars.remove_task(self._tasks.pop()[0])
        if not self._tasks:
            self._bars.stop()

    def close(self) -> None:
        """Remove all tasks, also after an error."""
        while self._tasks:
            self.stop()


@contextmanager
def terminal_progress() -> Iterator[Progress]:
    """Yield a progress that draws on a terminal, and prints lines on any other error output.

    Work of less than a few seconds is not shown.
    """
    is_drawn = sys.stderr.isatty()
    progress = TerminalProgress(Console(stderr=True)) if is_drawn else PrintedProgress()
    with closing(progress):
        yield progress
