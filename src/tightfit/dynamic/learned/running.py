"""A step as far as it has come: its operators, and the contents they use, by number."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from tightfit.dynamic.history import Content
from tightfit.dynamic.learned.trace import Asked, Made, Met
from tightfit.dynamic.noted import Noted

__all__ = ["RunningStep"]


class RunningStep:
    """Counts what a step meets and makes."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.made: list[tuple[Made, ...]] = []
        self.met: list[Met] = []
        self._contents: list[weakref.ref[Content]] = []

    @property
    def position(self) -> int:
        """The number of operators that have finished."""
        return len(self.made)

    def content(self, number: int) -> Content | None:
        """Return a content by its number; None if nobody knows it any more."""
        return self._contents[number]()

    def number_of(self, content: Content) -> int | None:
        """Return the number of a content; None if this step has not used it."""
        counted = content.counted
        return counted[1] if counted is not None and counted[0] is self else None

    def ask(self, function: object, noted: Noted) -> Asked:
        """An operator is about to run."""
        unread = self._numbers(noted.unread) if noted.unread else ()
        asked = Asked(function, self._numbers(noted.reads), unread)
        self.asked.append(asked)
        return asked

    def makes(
        self, contents: Sequence[Content], before: Sequence[Content | None]
    ) -> tuple[Made, ...]:
        """It has run: what it has made, and what lay there before."""
        made: list[Made] = []
        for content, old in zip(contents, before, strict=True):
            over = None if old is None else self.number_of(old)
            repeats = content.maker is not None
            number = self._count(content)
            made.append(Made(number, -1 if over is None else over, content.size_bytes, repeats))
        found = tuple(made)
        self.made.append(found)
        return found

    def _numbers(self, contents: Iterable[Content]) -> tuple[int, ...]:
        found: list[int] = []
        for content in contents:
            counted = content.counted
            if counted is not None and counted[0] is self:
                found.append(counted[1])
                continue
            number = self._count(content)
            found.append(number)
            self.met.append(Met(number, content.size_bytes, content.maker is not None))
        return tuple(found)

    def _count(self, content: Content) -> int:
        number = len(self._contents)
        content.count_as(self, number)
        self._contents.append(weakref.ref(content))
        return number
