"""In which order the parts of a model run, also those that are left out now and then."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tightfit.session.parts.kinds import Part

__all__ = ["Turns"]


class Turns:
    """The parts seen so far, each after the one that ran before it when it was first seen."""

    def __init__(self) -> None:
        self._parts: list[Part] = []

    def note(self, called: Sequence[Part]) -> None:
        """Learn from the parts that ran in a step: a new one runs after the one before it."""
        place = 0
        for part in called:
            if part not in self._parts:
                self._parts.insert(place, part)
            place = self._parts.index(part) + 1

    def order(self, absent: Iterable[Part] = ()) -> dict[Part, int]:
        """Return each part's turn; those that have never run come among others of their class.

        Parameters
        ----------
        absent : iterable of Part
            Parts that have not run yet.
        """
        parts = list(self._parts)
        for part in absent:
            alike = [other for other in parts if other.is_of_class(part)]
            earlier = [other for other in alike if other.number < part.number]
            if earlier:
                parts.insert(parts.index(earlier[-1]) + 1, part)
            else:
                parts.insert(parts.index(alike[0]) if alike else len(parts), part)
        return {part: turn for turn, part in enumerate(parts)}
