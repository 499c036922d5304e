"""Which modules run as ops because values decide in them, and how often they do."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Decided"]

_MANY_ANSWERS = 2  # besides the first
_MANY_MISSES = 6  # one after the other


class Decided:
    """What is known of values that decide what a callee runs, by signature.

    Attributes
    ----------
    opaque, answered : frozenset of str
        Modules in which data decide: run as one op, or captured for the answers of a call.
    """

    def __init__(self) -> None:
        self.opaque: frozenset[str] = frozenset()
        self.answered: frozenset[str] = frozenset()
        self._as_ops: frozenset[str] = frozenset()
        self._otherwise: dict[Hashable, int] = {}
        self._misses: dict[Hashable, int] = {}

    def note_other_answers(self, key: Hashable) -> bool:
        """Note that computed values decide otherwise; return whether that is now often."""
        self._otherwise[key] = self._otherwise.get(key, 0) + 1
        return self._otherwise[key] == _MANY_ANSWERS

    def is_often(self, key: Hashable) -> bool:
        """Whether computed values have often decided otherwise than in the calls before."""
        return self._otherwise.get(key, 0) >= _MANY_ANSWERS

    def note_served(self, key: Hashable) -> None:
        """Note that inputs decide as in a call before."""
        self._misses.pop(key, None)

    def note_missed(self, key: Hashable) -> bool:
        """Note that inputs decide as never before; return whether that is now often."""
        self._misses[key] = self._misses.get(key, 0) + 1
        return self._misses[key] == _MANY_MISSES

    def note_captured(self, opaque: frozenset[str], answered: frozenset[str]) -> None:
        """Note as what modules were captured."""
        self.opaque, self.answered = opaque, answered

    def run_as_ops(self, named: frozenset[str]) -> None:
        """Run modules as one op each from now on."""
        self._as_ops |= named
        self.opaque, self.answered = self.opaque | named, self.answered - named

    def run_as_traced(self, named: frozenset[str]) -> None:
        """Look into modules after all that were to run as one op, for the answers of a call."""
        self._as_ops -= named
        self.opaque, self.answered = self.opaque - named, self.answered | named

    def no_ops(self) -> bool:
        """Look into all modules again that became ops; return whether there were any."""
        named = self._as_ops
        self.run_as_traced(named)
        return bool(named)
