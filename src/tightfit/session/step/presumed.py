"""Steps that were not measured: the most bytes that their calls would hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tightfit.session.step.holding import Holding
from tightfit.session.step.ledger import CallKind, Interval, StepLedger

_ROUNDING = 1.0 + 1e-15  # 63 / 93 * 93 is a little less than 63


@dataclass(frozen=True)
class KeptRange:
    """The bytes that plans of a call may keep for its backward, and work with."""

    least_bytes: int  # kept by the plan that keeps least
    most_bytes: int  # kept by the plan that keeps everything
    working_bytes: int  # the most that a forward or a backward of either holds in addition

    @property
    def span_bytes(self) -> int:
        return max(0, self.most_bytes - self.least_bytes)

    def times(self, calls: int) -> KeptRange:
        """Return the range of several calls, one of which works at a time."""
        return KeptRange(calls * self.least_bytes, calls * self.most_bytes, self.working_bytes)

    def at(self, fraction: float) -> Holding:
        """Return the bytes of a plan that keeps a fraction between the least and the most."""
        kept = self.least_bytes + int(fraction * self.span_bytes * _ROUNDING)
        working = self.working_bytes
        return Holding(None, kept, 0, 0, kept + working, working, 1.0 - fraction, 0.0)


def presumed_step(
    calls: Sequence[CallKind], holdings: Sequence[Holding], base_bytes: int
) -> StepLedger[CallKind]:
    """Return a step in which all other calls await their backward when that of any call begins."""
    intervals, held, every = list[Interval](), 0, tuple(range(len(calls)))
    for call, own in enumerate(holdings):
        intervals.append(Interval("forward", call, every[:call], held, held + own.forward_bytes))
        held += own.staying_bytes
    for call, own in enumerate(holdings):
        begin = held + own.tangent_bytes
        others = (*every[:call], *every[call + 1 :])
        intervals.append(Interval("backward", call, others, begin, begin + own.rise_bytes))
    return StepLedger(tuple(calls), tuple(holdings), tuple(intervals), base_bytes=base_bytes)


def common_fraction(
    ranges: Mapping[CallKind, KeptRange], base_bytes: int, limit_bytes: int
) -> float:
    """Return the fraction between the least and the most that each of some calls may keep.

    `base_bytes`: held when the first of them begins. 1: they may keep everything. 0: not even the
    least may fit.
    """
    least, most = ([each.at(part) for each in ranges.values()] for part in (0.0, 1.0))
    ledger = presumed_step([*ranges], least, base_bytes)
    peaks = ledger.peaks_of(least)
    if peaks.max() > limit_bytes:
        return 0.0
    rises = ledger.peaks_of(most) - peaks  # in proportion to additional bytes kept
    parts = (limit_bytes - peaks)[rises > 0] / rises[rises > 0]
    return float(parts.min(initial=1.0))
