"""Notes which calls are run again in their backward."""

from __future__ import annotations

from typing import Any


class RepeatedCalls:
    """Which calls had a backward, and which were run again in it, by a key of calls alike."""

    def __init__(self) -> None:
        self._with_backward: set[Any] = set()
        self._repeated: set[Any] = set()

    def note_backward(self, key: Any) -> None:
        self._with_backward.add(key)

    def note_repeated(self, key: Any) -> None:
        self._repeated.add(key)

    def is_repeated(self, key: Any) -> bool:
        return key in self._repeated

    def may_repeat(self, key: Any) -> bool:
        """Whether calls may be run again: it has happened, or they have had no backward yet."""
        return key not in self._with_backward or self.is_repeated(key)
