"""An arena whose steps begin with the calls of a model."""

from __future__ import annotations

import threading
from collections.abc import Hashable

from tightfit.arenas.arena import Arena, ArenaReport
from tightfit.errors import BadInput

__all__ = ["CallArena"]


class CallArena:
    """Everything the calling thread requests from one call to the next is a step.

    Where a call cannot begin a step, because another arena or recording is active, because it
    comes from another thread or because memory is short, it runs without one: that is counted.
    """

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self._thread: int | None = None
        self._calls_without = 0

    def begin_step(self, shape: Hashable) -> None:
        """End the step before, and begin one that is called by its shape."""
        if self._arena is not None and self._thread != threading.get_ident():
            self._calls_without += 1
            return
        try:
            if self._arena is None:
                self._thread = threading.get_ident()
                self._arena = Arena().__enter__()
            self._arena.step(shape)
        except (BadInput, RuntimeError, MemoryError):
            # another arena is entered, another recording runs, or there is no room for a mapping
            self._calls_without += 1
            self.leave()

    def leave(self) -> None:
        """Give the memory back, once nothing in it is alive."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.__exit__(None, None, None)

    @property
    def report(self) -> ArenaReport | None:
        """What happened in the steps that ended; None while there is no arena."""
        return None if self._arena is None else self._arena.report

    @property
    def calls_without(self) -> int:
        """How many calls could not begin a step."""
        return self._calls_without
