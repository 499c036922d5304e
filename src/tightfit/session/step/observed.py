"""Writes the ledger of the running step, from readings of a meter."""

from __future__ import annotations

from typing import Any, Protocol

from tightfit.session.step.holding import Holding
from tightfit.session.step.ledger import Interval, Phase, StepLedger


class PeakMeter(Protocol):
    """Reads bytes held above the begin of the step that it measures."""

    def live_bytes(self) -> int:
        """Return the bytes held now."""

    def take_peak(self) -> int:
        """Return the most bytes held since the last call of this."""


class LedgerWriter:
    """Writes the ledger of a step that has begun."""

    def __init__(self, meter: PeakMeter) -> None:
        self._meter = meter
        self._calls: list[Any] = []
        self._holdings: list[Holding] = []
        self._parts: list[Any] = []
        self._intervals: list[Interval] = []
        self._open: list[int] = []
        self._current: tuple[Phase, int, tuple[int, ...], int] = ("between", -1, (), 0)

    @property
    def is_complete(self) -> bool:
        """Whether every call has had its backward."""
        return not self._open and self._current[0] == "between"

    @property
    def has_begun_backward(self) -> bool:
        return "backward" in (self._current[0], *(each.phase for each in self._intervals))

    @property
    def begin_bytes(self) -> int:
        """The bytes held when the current call began, or the code between calls."""
        return self._current[3]

    def awaiting(self) -> list[Any]:
        """Return the kinds of the calls that await their backward."""
        return [self._calls[call] for call in self._open]

    def awaits(self, call: int) -> bool:
        """Whether a call's backward is to come."""
        return call in self._open

    def forward_begins(self, kind: Any, holding: Holding, part: Any = None) -> int:
        """Note a call; return its number."""
        self._calls.append(kind)
        self._holdings.append(holding)
        self._parts.append(part)
        self._begin("forward", len(self._calls) - 1)
        return len(self._calls) - 1

    def forward_ended(self, call: int) -> None:
        """Note that a call awaits its backward."""
        self._open.append(call)
        self._begin("between", -1)

    def backward_begins(self, call: int) -> None:
        self._open.remove(call)
        self._begin("backward", call)

    def backward_ended(self) -> None:
        """Note that the last gradient of a call was handed over."""
        self._begin("between", -1)

    def dropped(self, call: int) -> None:
        """Note that the backward of a call will not come: its outputs are gone."""
        self._open.remove(call)

    def end_interval(self) -> None:
        """End the current interval, as other code follows."""
        self._begin("between", -1)

    def ledger(self, base_bytes: int) -> StepLedger[Any]:
        """End the step; return its ledger."""
        self._begin("between", -1)
        return StepLedger(
            tuple(self._calls),
            tuple(self._holdings),
            tuple(self._intervals),
            tuple(self._parts),
            base_bytes,
        )

    def _begin(self, phase: Phase, call: int) -> None:
        """End the current interval and begin another."""
        self._intervals.append(Interval(*self._current, self._meter.take_peak()))
        self._current = (phase, call, tuple(self._open), self._meter.live_bytes())
