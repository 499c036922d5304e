"""The bytes that the planned calls of a step hold in each interval, also under other plans.

A step lasts from its first planned forward until no backward is awaited any more. Between its
calls other code runs: eager modules, the loss, collectives with their buffers. The bytes of that
code do not depend on plans and are measured; those of calls follow from their plans. So the peak
under any choice of plans follows from one measured step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy
from numpy.typing import NDArray

from tightfit.session.step.holding import Holding

CallKind = TypeVar("CallKind")
Numbers: TypeAlias = NDArray[numpy.int64]
Phase: TypeAlias = Literal["forward", "backward", "between"]


@dataclass(frozen=True)
class Interval:
    """A part of a step between two events: a forward or a backward begins or ends."""

    phase: Phase  # ``"forward"`` or ``"backward"`` of a call, or ``"between"``
    call: int  # which call, counted from the begin of the step; -1 between them
    open: tuple[int, ...]  # the calls whose forward has ended and whose backward has not begun
    # begin_bytes, peak_bytes: held at its begin and at most, above the begin of the step
    begin_bytes: int
    peak_bytes: int

    @property
    def is_planned(self) -> bool:
        """Whether its bytes depend on plans: a call runs, or awaits its backward."""
        return bool(self.open) or self.phase != "between"

    @property
    def holding(self) -> tuple[int, ...]:
        """The calls that hold their saved tensors."""
        return (*self.open, self.call) if self.phase == "backward" else self.open

    def rise_bytes(self, holdings: Sequence[Holding]) -> int:
        """Return the most that its own call holds above its begin."""
        if self.phase == "between":
            return 0
        own = holdings[self.call]
        return own.forward_bytes if self.phase == "forward" else own.rise_bytes


@dataclass(frozen=True, eq=False)
class IntervalMatrices:
    """The planned intervals as rows of matrices; the last row is the begin of the step."""

    # The peak, without saved tensors of calls and without bytes of the own call
    fixed_bytes: Numbers
    holds: Numbers  # which calls hold their saved tensors, a column each
    forward: Numbers  # whose forward it is, a column each
    backward: Numbers  # whose backward it is, a column each


@dataclass(frozen=True)
class StepLedger(Generic[CallKind]):
    """A step, measured or presumed."""

    calls: tuple[CallKind, ...] = ()  # the kind of each call, in order
    holdings: tuple[Holding, ...] = ()  # bytes of each call by its plan
    intervals: tuple[Interval, ...] = ()  # in order
    # Which part of a model each call was of, for steps that may leave parts out
    parts: tuple[Any, ...] = ()
    base_bytes: int = 0  # held at its begin: constants of all calls, with those still to come

    def with_base(self, base_bytes: int) -> StepLedger[CallKind]:
        return replace(self, base_bytes=base_bytes)

    @property
    def outside_bytes(self) -> int:
        """The most that was held while no call held anything, the optimizer's step left out."""
        outside = (i.peak_bytes for i in self.intervals[:-1] if not i.is_planned)
        return self.base_bytes + max(outside, default=0)

    def peak_with(self, chosen: Mapping[CallKind, Holding]) -> int:
        """Return the peak with other plans for the kinds of calls."""
        calls = zip(self.calls, self.holdings, strict=True)
        return self.peak_of([chosen.get(kind, old) for kind, old in calls])

    def peak_of(self, new: Sequence[Holding]) -> int:
        """Return the peak with another plan for each call.

        Intervals in which no call holds anything, such as the optimizer's step, are left out.
        """
        return int(self.peaks_of(new).max())

    def peaks_of(self, new: Sequence[Holding]) -> Numbers:
        """Return the peaks of the rows of `matrices` with another plan for each call."""
        every = self.matrices
        peaks = self.base_bytes + every.fixed_bytes
        peaks = peaks + every.holds @ [holding.saved_bytes for holding in new]
        peaks = peaks + every.forward @ [holding.forward_bytes for holding in new]
        return peaks + every.backward @ [holding.rise_bytes for holding in new]

    def forward_peak_of(self, new: Sequence[Holding]) -> int:
        """Return the peak until the first backward begins, with another plan for each call."""
        phases = [interval.phase for interval in self.planned]
        count = phases.index("backward") if "backward" in phases else len(phases)
        return int(self.peaks_of(new)[:count].max(initial=self.base_bytes))

    def begin_of(self, call: int, new: Sequence[Holding]) -> int:
        """Return bytes held when a call's forward begins, with another plan for each call."""
        own = self._forwards[call]
        moved = (new[other].saved_bytes - self.holdings[other].saved_bytes for other in own.open)
        return self.base_bytes + own.begin_bytes + sum(moved)

    @cached_property
    def _forwards(self) -> dict[int, Interval]:
        """The first interval of each call's forward."""
        return {i.call: i for i in reversed(self.intervals) if i.phase == "forward"}

    def rooms(self, saved_bytes: Mapping[CallKind, int], limit_bytes: int) -> dict[CallKind, int]:
        """Return the bytes that each call of a kind may hold at its peak.

        `saved_bytes`: what calls of each kind may hold from forward to backward.
        """
        every = self.matrices
        saved = numpy.array([saved_bytes[kind] for kind in self.calls])
        left = limit_bytes - self.base_bytes - every.fixed_bytes - every.holds @ saved
        # when its backward begins, its saved tensors, its outputs and their gradients are its own
        left += every.backward @ (saved + [own.boundary_bytes for own in self.holdings])
        return {
            kind: int(left[(every.forward + every.backward)[:, own].any(axis=1)].min())
            for kind, own in self.calls_by_kind.items()
        }

    @property
    def calls_by_kind(self) -> dict[CallKind, list[int]]:
        found: dict[CallKind, list[int]] = {}
        for call, kind in enumerate(self.calls):
            found.setdefault(kind, []).append(call)
        return found

    @cached_property
    def planned(self) -> tuple[Interval, ...]:
        return tuple(each for each in self.intervals if each.is_planned)

    @cached_property
    def matrices(self) -> IntervalMatrices:
        empty = numpy.zeros((len(self.planned) + 1, len(self.calls)), dtype=numpy.int64)
        holds, forward, backward = empty, empty.copy(), empty.copy()
        for place, each in enumerate(self.planned):
            holds[place, [*each.holding]] = 1
            if each.phase != "between":
                (forward if each.phase == "forward" else backward)[place, each.call] = 1
        held = holds @ [holding.saved_bytes for holding in self.holdings]
        fixed = numpy.array([*map(self._fixed_bytes, self.planned), 0])
        return IntervalMatrices(fixed - held, holds, forward, backward)

    def _fixed_bytes(self, interval: Interval) -> int:
        """Return the peak of an interval without the planned bytes of its own call."""
        if interval.phase == "between":
            return interval.peak_bytes
        unforeseen = interval.peak_bytes - interval.begin_bytes
        unforeseen -= interval.rise_bytes(self.holdings)  # more than planned
        return interval.begin_bytes + max(0, unforeseen)
