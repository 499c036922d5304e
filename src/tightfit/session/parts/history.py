"""What is known of steps that are alike: the last one's ledger, and the plans chosen by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tightfit.session.parts.choice import Choice
from tightfit.session.parts.kinds import Kind, Part, forget_oldest
from tightfit.session.parts.ledger import Holding, Ledger

__all__ = ["Level", "Levels", "Turns"]

_MOST_LEVELS = 16


@dataclass
class Level:
    """What is known of steps with the same inputs that begin with about as much held.

    Parameters
    ----------
    signature : hashable
        Of the inputs.
    held_bytes : int
        At the begin, with what is yet to come to stay.
    ledger : Ledger or None
        The last such step.
    choice : Choice or None
        The plans of the parts; None while they are learned about.
    planned : Ledger
        The step that they are for: all parts run that may.
    planned_bytes : int
        The peak that follows, all that is held included.
    """

    signature: Any
    held_bytes: int
    ledger: Ledger[Kind] | None = None
    choice: Choice | None = None
    planned: Ledger[Kind] = field(default_factory=Ledger)
    planned_bytes: int = 0
    _turn: int = 0

    def begin(self) -> None:
        """Begin a step."""
        self._turn = 0

    def foreseen(self, part: Part, kind: Kind) -> Holding | None:
        """Return the plan of the next call; None if the step was not planned to have it now."""
        if self.choice is None:
            return None
        parts, calls = self.planned.parts, self.planned.calls
        for turn in range(self._turn, len(calls)):
            if (parts[turn], calls[turn]) == (part, kind):
                self._turn = turn + 1
                return self.choice.calls[turn]
        return None


class Levels:
    """Levels by the signature of a step's inputs.

    Gradients that are accumulated and the optimizer's state make steps differ that have the same
    inputs.
    """

    def __init__(self) -> None:
        self._known: dict[Any, list[Level]] = {}

    def of(self, signature: Any, held_bytes: int, alike_bytes: int) -> Level:
        """Return what is known of steps that begin with as much held; one begins now.

        Parameters
        ----------
        signature : hashable
            Of the inputs.
        held_bytes : int
            At the begin.
        alike_bytes : int
            What two steps may differ by at their begin and still be alike.
        """
        levels = self._known.setdefault(signature, [])
        forget_oldest(self._known)
        near = [level for level in levels if abs(level.held_bytes - held_bytes) <= alike_bytes]
        if near:
            found = min(near, key=lambda level: abs(level.held_bytes - held_bytes))
            found.begin()
            return found
        levels.append(Level(signature, held_bytes))
        del levels[:-_MOST_LEVELS]
        return levels[-1]


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
