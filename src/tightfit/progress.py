"""How long work reports progress and how it is interrupted."""

from __future__ import annotations

import sys
from typing import Protocol

__all__ = ["SILENT", "Progress", "Silent", "Until", "announce"]


class Progress(Protocol):
    """Receives what a long task does; the CLI draws it, a library call is silent.

    A task calls `start`, then `update` any number of times, then `stop`; tasks may nest.
    `update` is also the point where a task may be interrupted: it may raise
    ``KeyboardInterrupt``.
    """

    def start(self, title: str, total: int | None = None) -> None:
        """Begin a task of `total` steps (None: unknown)."""
        ...

    def update(self, done: int, note: str = "") -> None:
        """Report that `done` steps are finished, with a short note on the state."""
        ...

    def stop(self) -> None:
        """End the task that was started last."""
        ...


class _Event(Protocol):
    def is_set(self) -> bool: ...


class Silent:
    """A progress that shows nothing."""

    def start(self, title: str, total: int | None = None) -> None:
        """Do nothing."""

    def update(self, done: int, note: str = "") -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


class Until(Silent):
    """A progress that shows nothing and interrupts its task once an event is set.

    Parameters
    ----------
    stopped : event
        Of a thread or of a process.
    """

    def __init__(self, stopped: _Event) -> None:
        self._stopped = stopped

    def update(self, done: int, note: str = "") -> None:
        """Interrupt the task if the event is set."""
        if self._stopped.is_set():
            raise KeyboardInterrupt


SILENT = Silent()


def announce(message: str) -> None:
    """Tell the user one line, on standard error."""
    print(f"tightfit: {message}", file=sys.stderr)
