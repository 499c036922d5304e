"""Searching better plans in a thread while training goes on with known plans."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from tightfit.progress import Progress, StoppableProgress

_FAREWELL_S = 2.0
_MOST_ATTEMPTS = 5
_LOOKS_EVERY_S = 0.2  # whether a search that awaits its turn was cancelled

_ONE_AT_A_TIME = threading.Lock()
_UNFINISHED: WeakSet[Search[Any]] = WeakSet()

Found = TypeVar("Found")


class Search(Generic[Found]):
    """A search that runs in a thread; searches run one after the other.

    `plan`: given a progress, returns its result; touches nothing else. Long work in it belongs into
    another process (`apart`): training waits for the interpreter's lock.
    """

    def __init__(self, plan: Callable[[Progress], Found]) -> None:
        self._plan = plan
        self._stopped = threading.Event()
        self._found: Found | None = None
        self._error: Exception | None = None
        _UNFINISHED.add(self)
        self._thread = threading.Thread(target=self._run, daemon=True, name="tightfit planner")
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Found | None:
        """Return the result of a search that is done; None if it was cancelled before.

        Raises the planner's exception, if there was one.
        """
        if self._error is not None:
            raise self._error
        return self._found

    def wait(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)

    def cancel(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                if _ONE_AT_A_TIME.acquire(timeout=_LOOKS_EVERY_S):
                    try:
                        self._found = self._searched()
                        return
                    finally:
                        _ONE_AT_A_TIME.release()
        except KeyboardInterrupt:  # raised by the progress of a cancelled search
            pass
        except Exception as error:  # the training loop's thread raises it
            self._error = error
        finally:
            _UNFINISHED.discard(self)

    def _searched(self) -> Found:
        attempts = _MOST_ATTEMPTS
        while True:
            try:
                return self._plan(StoppableProgress(self._stopped))
            except SystemError:  # `gc.get_objects` of another thread saw a half-made tuple
                attempts -= 1
                if not attempts:
                    raise


def searching() -> bool:
    """Whether any search goes on in this process: it takes processor time."""
    return bool(_UNFINISHED)


@atexit.register
def _end() -> None:
    """Let no solver run on while the interpreter is torn down."""
    for search in list(_UNFINISHED):
        search.cancel()
    for search in list(_UNFINISHED):
        search.wait(_FAREWELL_S)
