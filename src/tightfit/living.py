"""Objects that others keep alive, looked at in every step: a weak set costs ten times as much."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Living(Generic[T]):
    """Some objects, as long as other code keeps them, in the order in which they came."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[T]] = []

    def __iter__(self) -> Iterator[T]:
        return iter(self.now())

    def now(self) -> list[T]:
        if not self._references:
            return []
        # of a copy: an object that dies meanwhile is taken out of the list
        return [member for known in tuple(self._references) if (member := known()) is not None]

    def are_only(self, member: T) -> bool:
        """Whether no other than one object lives now, and it is among them."""
        known = self._references
        return len(known) == 1 and known[0]() is member

    def add(self, member: T) -> None:
        """Take one more object, which is not among them."""
        self._references.append(weakref.ref(member, self._references.remove))

    def discard(self, member: T) -> None:
        """Leave an object out, if it is among them."""
        for known in tuple(self._references):
            if known() is member:
                self._references.remove(known)
