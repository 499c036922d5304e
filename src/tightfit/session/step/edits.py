"""The ledger of a step in which other parts run than in the measured step.

A model may run a part in one step and not in the next. The bytes of a call are known: it holds the
tensors saved by its plan from its forward to its backward, and then new gradients. So calls can be
added to a measured step, and removed from it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any, Generic

from tightfit.session.step.holding import Holding
from tightfit.session.step.ledger import CallKind, Interval, StepLedger


@dataclass(frozen=True)
class PossibleCall(Generic[CallKind]):
    """A call that a step did not have and may have."""

    kind: CallKind
    holding: Holding
    gradient_bytes: int  # new gradients of its parameters


def with_calls(
    ledger: StepLedger[CallKind],
    possible: Mapping[Any, PossibleCall[CallKind]],
    order: Mapping[Any, int],
) -> StepLedger[CallKind]:
    """Return the ledger of a step in which more parts run.

    `order`: the place of each part; parts without a place run last.
    """
    last = len(order)
    for part, call in possible.items():
        turn = order.get(part, last)
        later = (i for i, other in enumerate(ledger.parts) if order.get(other, last) > turn)
        ledger = with_call(ledger, next(later, len(ledger.calls)), part, call)
    return ledger


def as_called(
    ledger: StepLedger[CallKind],
    wanted: StepLedger[CallKind],
    possible: Mapping[Any, PossibleCall[CallKind]],
) -> StepLedger[CallKind] | None:
    """Return the ledger of a measured step as if it had the calls of another.

    `wanted`: the other, of which only the called parts are read. `possible`: by part, calls that
    the measured step has not had. Returns None if a part is not known.
    """
    parts = wanted.parts
    changes = SequenceMatcher(None, ledger.parts, parts, autojunk=False).get_opcodes()
    for change, begin, end, first, last in reversed(changes):
        if change == "equal":
            continue
        for call in reversed(range(begin, end)):
            ledger = without_call(ledger, call)
        for part in reversed(parts[first:last]):
            if part not in possible:
                return None
            ledger = with_call(ledger, begin, part, possible[part])
    return ledger


def with_call(
    ledger: StepLedger[CallKind], place: int, part: Hashable, further: PossibleCall[CallKind]
) -> StepLedger[CallKind]:
    """Return the ledger with one more call, before the call with the number `place`.

    Its backward comes before that of the call before it.
    """
    intervals = [_renumbered(interval, place, 1) for interval in ledger.intervals]
    begin = _first(intervals, "forward", place + 1)
    if begin is None:
        begin = 1 + max((i for i, m in enumerate(intervals) if m.phase == "forward"), default=-1)
    backwards = (_first(intervals, "backward", call) for call in reversed(range(place)))
    turn = next((found for found in backwards if found is not None), len(intervals) - 1)
    turn = max(begin, turn)
    stays = further.holding.staying_bytes
    held = intervals[begin].begin_bytes
    forward = Interval(
        "forward", place, intervals[begin].open, held, held + further.holding.forward_bytes
    )
    opened = (
        *intervals[turn].open,
        *((intervals[turn].call,) if intervals[turn].call >= 0 else ()),
    )
    held = intervals[turn].begin_bytes + stays
    backward = Interval("backward", place, opened, held, held + further.holding.rise_bytes)
    return replace(
        ledger,
        calls=(*ledger.calls[:place], further.kind, *ledger.calls[place:]),
        holdings=(*ledger.holdings[:place], further.holding, *ledger.holdings[place:]),
        intervals=(
            *intervals[:begin],
            forward,
            *(_shifted(i, stays, tuple(sorted((*i.open, place)))) for i in intervals[begin:turn]),
            backward,
            *(_shifted(i, further.gradient_bytes, i.open) for i in intervals[turn:]),
        ),
        parts=(*ledger.parts[:place], part, *ledger.parts[place:]),
    )


def with_more(ledger: StepLedger[CallKind], more_bytes: Sequence[int]) -> StepLedger[CallKind]:
    """Return the ledger of a step whose calls hold more, each from its forward to its backward."""

    def shifted(interval: Interval) -> Interval:
        calls = {*interval.holding, *([interval.call] if interval.phase == "forward" else [])}
        return _shifted(interval, sum(more_bytes[call] for call in calls), interval.open)

    if not any(more_bytes):
        return ledger
    return replace(ledger, intervals=tuple(map(shifted, ledger.intervals)))


def without_call(ledger: StepLedger[CallKind], call: int) -> StepLedger[CallKind]:
    intervals = ledger.intervals
    begin, turn = _first(intervals, "forward", call), _first(intervals, "backward", call)
    assert begin is not None
    stays = ledger.holdings[call].staying_bytes
    kept = [*intervals[:begin]]
    for interval in intervals[begin + 1 : turn]:
        kept.append(_shifted(interval, -stays, tuple(c for c in interval.open if c != call)))
    if turn is not None:
        after = min(turn + 2, len(intervals) - 1)  # the call's outputs are freed by then
        grown = intervals[after].begin_bytes - intervals[turn].begin_bytes + stays
        kept += [
            _shifted(interval, -max(0, grown), interval.open) for interval in intervals[turn + 1 :]
        ]
    return replace(
        ledger,
        calls=(*ledger.calls[:call], *ledger.calls[call + 1 :]),
        holdings=(*ledger.holdings[:call], *ledger.holdings[call + 1 :]),
        intervals=tuple(_renumbered(each, call + 1, -1) for each in kept),
        parts=(*ledger.parts[:call], *ledger.parts[call + 1 :]),
    )


def _first(intervals: Sequence[Interval], phase: str, call: int) -> int | None:
    found = (
        i
        for i, interval in enumerate(intervals)
        if interval.phase == phase and interval.call == call
    )
    return next(found, None)


def _renumbered(interval: Interval, first: int, by: int) -> Interval:
    """Return the interval with calls from a number on renumbered."""

    def number(call: int) -> int:
        return call + by if call >= first else call

    opened = tuple(map(number, interval.open))
    return Interval(
        interval.phase, number(interval.call), opened, interval.begin_bytes, interval.peak_bytes
    )


def _shifted(interval: Interval, more_bytes: int, opened: tuple[int, ...]) -> Interval:
    """Return the interval with more bytes held, and other calls that await their backward."""
    begin_bytes, peak_bytes = interval.begin_bytes + more_bytes, interval.peak_bytes + more_bytes
    return Interval(interval.phase, interval.call, opened, begin_bytes, peak_bytes)
