"""What is known of steps that are alike: the last one's ledger, and the plans chosen by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tightfit.api.parts.calls import Part, forget_oldest
from tightfit.api.parts.kinds import Kind
from tightfit.api.parts.ledger import Holding, Ledger

__all__ = ["Level", "Levels"]

_MOST_LEVELS = 16


@dataclass
class Level:
    """What is known of steps with the same inputs that begin with about as much held.

    Parameters
    ----------
    held_bytes : int
        At the begin, with what is yet to come to stay.
    ledger : Ledger or None
        The last such step.
    called : set of Part
        The parts that ran in it.
    chosen : dict of Kind to Holding
        The plans of the kinds of parts; empty while they are learned about.
    planned_bytes : int
        The peak that follows, all that is held included.
    """

    held_bytes: int
    ledger: Ledger[Kind] | None = None
    called: set[Part] = field(default_factory=set)
    chosen: dict[Kind, Holding] = field(default_factory=dict)
    planned_bytes: int = 0

    def foresees(self, ledger: Ledger[Kind], kind: Kind) -> bool:
        """Whether the step under way has been like the last one so far, this call included."""
        calls = len(ledger.calls)
        return self.ledger is not None and self.ledger.calls[: calls + 1] == [*ledger.calls, kind]


class Levels:
    """Levels by the signature of a step's inputs.

    Gradients that are accumulated and the optimizer's state make steps differ that have the same
    inputs.
    """

    def __init__(self) -> None:
        self._known: dict[Any, list[Level]] = {}

    def of(self, signature: Any, held_bytes: int, alike_bytes: int) -> Level:
        """Return what is known of steps that begin with as much held.

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
            return min(near, key=lambda level: abs(level.held_bytes - held_bytes))
        levels.append(Level(held_bytes))
        del levels[:-_MOST_LEVELS]
        return levels[-1]
