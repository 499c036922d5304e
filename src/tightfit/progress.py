"""How long work reports progress and how it is interrupted."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, Protocol

__all__ = [
    "SILENT",
    "Interrupts",
    "Progress",
    "Silent",
    "Spoken",
    "Until",
    "announce",
    "said_while_waiting",
]

_SAID_EVERY_S = 5.0


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


@contextlib.contextmanager
def said_while_waiting(
    what: Callable[[], str], every_s: float = _SAID_EVERY_S
) -> Generator[None, None, None]:
    """Tell the user every few seconds what is waited for, while a block runs.

    Parameters
    ----------
    what : callable
        Returns what is done now; called from a thread of its own.
    every_s : float
        Seconds between two lines; a block that ends sooner says nothing.
    """
    ended = threading.Event()
    began_s = time.monotonic()

    def tell() -> None:
        while not ended.wait(every_s):
            announce(f"{what()} ({time.monotonic() - began_s:.0f} s so far)")

    threading.Thread(target=tell, daemon=True, name="tightfit progress").start()
    try:
        yield
    finally:
        ended.set()


class Spoken:
    """A progress that tells of long tasks in lines, where nothing can be drawn.

    Parameters
    ----------
    every_s : float
        Seconds between two lines.
    """

    def __init__(self, every_s: float = _SAID_EVERY_S) -> None:
        self._every_s = every_s
        self._titles: list[str] = []
        self._note = ""
        self._waiting = contextlib.ExitStack()

    def start(self, title: str, total: int | None = None) -> None:
        """Begin a task below those that run."""
        if not self._titles:
            self._waiting.enter_context(said_while_waiting(self._state, self._every_s))
        self._titles.append(title)
        self._note = ""

    def update(self, done: int, note: str = "") -> None:
        """Take the state of the task that was started last."""
        self._note = note

    def stop(self) -> None:
        """End the task that was started last."""
        if self._titles:
            self._titles.pop()
        if not self._titles:
            self._waiting.close()

    def close(self) -> None:
        """End all tasks, also after an error."""
        self._titles.clear()
        self._waiting.close()

    def _state(self) -> str:
        return ": ".join(filter(None, (*self._titles, self._note)))


class Interrupts:
    """Notes in a ``with`` block that the user has pressed Ctrl-C, whoever catches it there.

    Planners catch ``KeyboardInterrupt`` and return the best plan so far; a program that trains is
    to stop all the same.

    Attributes
    ----------
    seen : bool
        Whether it was pressed.
    """

    def __init__(self) -> None:
        self.seen = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        """Listen, where this thread may."""
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Listen no longer."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        self._before(number, frame)
