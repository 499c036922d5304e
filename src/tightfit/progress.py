"""How long work reports progress and how it is interrupted."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, Protocol

_SAID_FIRST_S = 2.0
_SAID_EVERY_S = 5.0


class Progress(Protocol):
    """Receives the progress of a long task; the CLI draws it, a library call is silent.

    A task calls `start`, then `update` any number of times, then `stop`; tasks may nest.
    `update` is also the point where a task may be interrupted: it may raise
    ``KeyboardInterrupt``.
    """

    def start(
        self, title: str, total: int | None = None, *, at_most_s: float | None = None
    ) -> None:
        """Begin a task of `total` steps that ends after `at_most_s` seconds (None: unknown)."""

    def update(self, done: int, note: str = "") -> None:
        """Report that `done` steps are finished, with a short note on the state."""

    def stop(self) -> None:
        """End the task that was started last."""


@contextlib.contextmanager
def shown(
    progress: Progress, title: str, total: int | None = None, *, at_most_s: float | None = None
) -> Generator[None, None, None]:
    """Show what runs meanwhile as a task of a progress."""
    progress.start(title, total, at_most_s=at_most_s)
    try:
        yield
    finally:
        progress.stop()


class _Event(Protocol):
    def is_set(self) -> bool: ...


class Silent(Progress):
    """A progress that shows nothing."""


class StoppableProgress(Silent):
    """A progress that shows nothing and interrupts its task once an event is set.

    `stopped`: of a thread or of a process.
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


class Announcements:
    """Tells the user each line once, however many plans give a reason for it."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            announce(message)


@contextlib.contextmanager
def said_while_waiting(
    what: Callable[[], str],
    every_s: float = _SAID_EVERY_S,
    remaining: Callable[[], str] = lambda: "",
) -> Generator[None, None, None]:
    """Tell the user the reason for waiting after two seconds, then every few, while a block runs.

    `what`, `remaining`: return the current work, and its remaining time; called from a thread
    of their own. `every_s`: seconds between two lines.
    """
    ended = threading.Event()
    began_s = time.monotonic()

    def tell() -> None:
        wait_s = min(every_s, _SAID_FIRST_S)
        while not ended.wait(wait_s):
            left = remaining()
            so_far = f"{time.monotonic() - began_s:.0f} s so far"
            announce(f"{what()} ({so_far}, {left})" if left else f"{what()} ({so_far})")
            wait_s = every_s

    threading.Thread(target=tell, daemon=True, name="tightfit progress").start()
    try:
        yield
    finally:
        ended.set()


class Pace:
    """How far a task is and how long it may still last.

    `total`: its steps, if they are known. `at_most_s`: seconds after which it ends, if it has a
    limit. `now`: returns the time in seconds.
    """

    def __init__(
        self,
        total: int | None,
        at_most_s: float | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._at_most_s = at_most_s
        self._now = now
        self._began_s = now()
        self._done = 0
        self._whole_s = 0.0

    def reached(self, done: int) -> None:
        """Note how many steps are finished."""
        if done > self._done:
            self._done = done
            self._whole_s = (self._now() - self._began_s) * (self._total or 0) / done

    def remaining(self) -> str:
        """Return such as ``"about 20 s left"``; empty where that is unknown.

        Of a step that takes longer than those before it, the rest is unknown.
        """
        so_far_s = self._now() - self._began_s
        limit_s = math.inf if self._at_most_s is None else max(0.0, self._at_most_s - so_far_s)
        if (by_steps_s := self._whole_s - so_far_s) > 0:
            return f"about {_duration(min(by_steps_s, limit_s))} left"
        return "" if limit_s == math.inf else f"at most {_duration(limit_s)} left"


def _duration(seconds: float) -> str:
    """Return such as ``"40 s"`` or ``"3 min"``."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


class PrintedProgress:
    """A progress that tells of long tasks in lines, where nothing can be drawn.

    `every_s`: seconds between two lines.
    """

    def __init__(self, every_s: float = _SAID_EVERY_S) -> None:
        self._every_s = every_s
        self._titles: list[str] = []
        self._paces: list[Pace] = []
        self._note = ""
        self._waiting = contextlib.ExitStack()

    def start(
        self, title: str, total: int | None = None, *, at_most_s: float | None = None
    ) -> None:
        """Begin a task below those that run."""
        if not self._titles:
            self._waiting.enter_context(
                said_while_waiting(self._state, self._every_s, self._remaining)
            )
        self._titles.append(title)
        self._paces.append(Pace(total, at_most_s))
        self._note = ""

    def update(self, done: int, note: str = "") -> None:
        """Take the state of the task that was started last."""
        self._note = note
        if self._paces:
            self._paces[-1].reached(done)

    def stop(self) -> None:
        if self._titles:
            self._titles.pop()
            self._paces.pop()
        if not self._titles:
            self._waiting.close()

    def close(self) -> None:
        """End all tasks, also after an error."""
        self._titles.clear()
        self._paces.clear()
        self._waiting.close()

    def _remaining(self) -> str:
        """Return how long the outermost task may still last."""
        return self._paces[0].remaining() if self._paces else ""

    def _state(self) -> str:
        return ": ".join(filter(None, (*self._titles, self._note)))


class Interrupts:
    """Notes in a ``with`` block that the user has pressed Ctrl-C, even if other code catches it.

    Planners catch ``KeyboardInterrupt`` and return the best plan so far; a program that trains is
    to stop all the same.

    `seen`: whether it was pressed.
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
