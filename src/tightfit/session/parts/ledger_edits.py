"""The ledger of a step in which other parts run than in the one that was measured.

A model may leave parts out of one step and not out of the next. What a call changes is known: it
holds what its plan keeps from its forward to its backward, and leaves new gradients behind. So
calls can be put into a measured step, and taken out of it again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Generic, TypeVar

from tightfit.session.parts.ledger import Holding, Ledger, Mark

__all__ = ["PossibleCall", "as_called", "with_call", "with_calls", "without_call"]

PartKind = TypeVar("PartKind")


@dataclass(frozen=True)
class PossibleCall(Generic[PartKind]):
    """A call that a step did not have and may have.

    Parameters
    ----------
    kind, holding : PartKind, Holding
        Of the part, and what it holds.
    gradient_bytes : int
        New gradients of its parameters.
    """

    kind: PartKind
    holding: Holding
    gradient_bytes: int


def with_calls(
    ledger: Ledger[PartKind],
    further: Mapping[Any, PossibleCall[PartKind]],
    order: Mapping[Any, int],
) -> Ledger[PartKind]:
    """Return the ledger of a step in which more parts run, each in its turn.

    Parameters
    ----------
    further : mapping
        The calls, by part.
    order : mapping of part to int
        In which order parts run; what is not in it runs last.
    """
    last = len(order)
    for part, each in further.items():
        turn = order.get(part, last)
        later = (i for i, other in enumerate(ledger.parts) if order.get(other, last) > turn)
        ledger = with_call(ledger, next(later, len(ledger.calls)), part, each)
    return ledger


def as_called(
    ledger: Ledger[PartKind],
    wanted: Ledger[PartKind],
    further: Mapping[Any, PossibleCall[PartKind]],
) -> Ledger[PartKind] | None:
    """Return what a measured step would have held with the calls of another one.

    Parameters
    ----------
    wanted : Ledger
        The other one, of which nothing is read but which parts it calls.
    further : mapping
        By part, what is known of calls that the measured step has not had.

    Returns
    -------
    Ledger or None
        None if a part is not known.
    """
    parts = wanted.parts
    changes = SequenceMatcher(None, ledger.parts, parts, autojunk=False).get_opcodes()
    for what, begin, end, first, last in reversed(changes):
        if what == "equal":
            continue
        for call in reversed(range(begin, end)):
            ledger = without_call(ledger, call)
        for part in reversed(parts[first:last]):
            if part not in further:
                return None
            ledger = with_call(ledger, begin, part, further[part])
    return ledger


def with_call(
    ledger: Ledger[PartKind], place: int, part: Hashable, each: PossibleCall[PartKind]
) -> Ledger[PartKind]:
    """Return the ledger with one more call, before the one with the number `place`.

    Its backward comes before that of the call before it.
    """
    marks = [_renumbered(mark, place, 1) for mark in ledger.marks]
    begin = _first(marks, "forward", place + 1)
    if begin is None:
        begin = 1 + max((i for i, m in enumerate(marks) if m.phase == "forward"), default=-1)
    backwards = (_first(marks, "backward", call) for call in reversed(range(place)))
    turn = next((found for found in backwards if found is not None), len(marks) - 1)
    turn = max(begin, turn)
    stays = each.holding.staying_bytes
    held = marks[begin].begin_bytes
    forward = Mark("forward", place, marks[begin].open, held, held + each.holding.forward_bytes)
    opened = (*marks[turn].open, *((marks[turn].call,) if marks[turn].call >= 0 else ()))
    held = marks[turn].begin_bytes + stays
    backward = Mark("backward", place, opened, held, held + each.holding.rise_bytes)
    return Ledger(
        [*ledger.calls[:place], each.kind, *ledger.calls[place:]],
        [*ledger.holdings[:place], each.holding, *ledger.holdings[place:]],
        [
            *marks[:begin],
            forward,
            *(_shifted(m, stays, tuple(sorted((*m.open, place)))) for m in marks[begin:turn]),
            backward,
            *(_shifted(m, each.gradient_bytes, m.open) for m in marks[turn:]),
        ],
        [*ledger.parts[:place], part, *ledger.parts[place:]],
    )


def without_call(ledger: Ledger[PartKind], call: int) -> Ledger[PartKind]:
    """Return the ledger of a step that leaves one call out."""
    marks = ledger.marks
    begin, turn = _first(marks, "forward", call), _first(marks, "backward", call)
    assert begin is not None
    stays = ledger.holdings[call].staying_bytes
    kept = [*marks[:begin]]
    for mark in marks[begin + 1 : turn]:
        kept.append(_shifted(mark, -stays, tuple(c for c in mark.open if c != call)))
    if turn is not None:
        after = min(turn + 2, len(marks) - 1)  # what the call gave others is freed by then
        grown = marks[after].begin_bytes - marks[turn].begin_bytes + stays
        kept += [_shifted(mark, -max(0, grown), mark.open) for mark in marks[turn + 1 :]]
    return Ledger(
        [*ledger.calls[:call], *ledger.calls[call + 1 :]],
        [*ledger.holdings[:call], *ledger.holdings[call + 1 :]],
        [_renumbered(mark, call + 1, -1) for mark in kept],
        [*ledger.parts[:call], *ledger.parts[call + 1 :]],
    )


def _first(marks: list[Mark], phase: str, call: int) -> int | None:
    found = (i for i, mark in enumerate(marks) if mark.phase == phase and mark.call == call)
    return next(found, None)


def _renumbered(mark: Mark, first: int, by: int) -> Mark:
    """Return the stretch with other numbers for the calls from one on."""

    def number(call: int) -> int:
        return call + by if call >= first else call

    opened = tuple(map(number, mark.open))
    return Mark(mark.phase, number(mark.call), opened, mark.begin_bytes, mark.peak_bytes)


def _shifted(mark: Mark, more_bytes: int, opened: tuple[int, ...]) -> Mark:
    """Return the same stretch with more held, and other calls that await their backward."""
    begin_bytes, peak_bytes = mark.begin_bytes + more_bytes, mark.peak_bytes + more_bytes
    return Mark(mark.phase, mark.call, opened, begin_bytes, peak_bytes)
