"""Divides a limit among the planned calls of a step.

Calls hold their saved tensors at the same time, but only one of them is at its peak. Saving more
in every call leaves less room for the peak of each. Calls of one kind have a menu of plans. The
search starts from combinations in which each kind saves the same fraction between its least and its
most. It then exchanges the plans of one or two kinds at a time as long as the step gets cheaper.
Bytes that are still free go to the last calls, which hold their saved tensors for the least time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Generic, TypeAlias

import numpy
from numpy.typing import NDArray

from tightfit.session.step.holding import Holding
from tightfit.session.step.ledger import CallKind, StepLedger

Menu: TypeAlias = Sequence[Holding]
"""Holdings of one kind of call, each by another plan."""

_FRACTIONS = 32
_MOST_EXCHANGED = 3  # combinations from which a better combination is looked for
_MOST_COMPARED = 8  # combinations that are tried with cheaper plans for the last calls


def by_kind(
    ledger: StepLedger[CallKind], limit_bytes: int, menus: Mapping[CallKind, Menu]
) -> dict[CallKind, Holding] | None:
    """Return the best combination found with the same holding for all calls of a kind.

    It is the combination from which the step gets cheapest by `by_call`. None: none was found that
    fits.

    `limit_bytes`: bytes held at the begin of the step included. `menus`: for each kind of call the
    holdings to choose from.
    """
    step = _Combinations(ledger, limit_bytes, menus)
    starts = {step.at(tried / _FRACTIONS) for tried in range(_FRACTIONS + 1)}
    likely = sorted(starts, key=step.excess_and_cost)[:_MOST_EXCHANGED]
    # neighbours may cost more with one plan a kind, and less once the last calls have another
    neighbours = {other for each in likely for other in step.neighbours(each)}
    tried = dict[_Choice, None]()
    for each in (starts | set(map(step.exchanged, likely)), neighbours):
        judged = sorted((step.excess_and_cost(choice), choice) for choice in each)[:_MOST_COMPARED]
        tried |= {choice: None for (over_bytes, _), choice in judged if over_bytes == 0}

    def cost_s(kinds: Mapping[CallKind, Holding]) -> float:
        calls = by_call(ledger, limit_bytes, kinds, menus)
        return sum(holding.cost_s for holding in calls)

    return min(map(step.holdings, tried), key=cost_s, default=None)


def by_call(
    ledger: StepLedger[CallKind],
    limit_bytes: int,
    kinds: Mapping[CallKind, Holding],
    menus: Mapping[CallKind, Menu],
) -> tuple[Holding, ...]:
    """Return a holding for each call: that of its kind, or for the last calls a cheaper holding.

    `kinds`: the holding of each kind, with which all calls fit.
    """
    calls = [kinds[kind] for kind in ledger.calls]
    for kind, called in ledger.calls_by_kind.items():
        own = called
        for holding in sorted(menus[kind], key=lambda holding: holding.cost_s):
            if not own or holding.cost_s >= kinds[kind].cost_s:
                break
            own, calls = _with_last(ledger, limit_bytes, calls, own, holding)
    return tuple(calls)


def _with_last(
    ledger: StepLedger[Any],
    limit_bytes: int,
    calls: list[Holding],
    own: list[int],
    holding: Holding,
) -> tuple[list[int], list[Holding]]:
    """Give another holding to as many of some calls as fit, the last first.

    Returns the calls that did not get it, and the holding of every call.
    """

    def with_last(count: int) -> list[Holding]:
        last = set(own[len(own) - count :])
        return [holding if i in last else old for i, old in enumerate(calls)]

    least, most = 0, len(own)
    while least < most:
        middle = (least + most + 1) // 2
        if ledger.peak_of(with_last(middle)) <= limit_bytes:
            least = middle
        else:
            most = middle - 1
    return own[: len(own) - least], with_last(least)


_Choice: TypeAlias = tuple[int, ...]
"""For each kind which holding of its menu."""


class _Combinations(Generic[CallKind]):
    """Peak and cost of a step under every combination of one holding a kind.

    The peak of an interval is a sum: fixed bytes, bytes of calls that await their backward, and the
    most that its own call holds. Arrays have a row for each plan and a column for each interval.
    """

    def __init__(
        self, ledger: StepLedger[CallKind], limit_bytes: int, menus: Mapping[CallKind, Menu]
    ) -> None:
        self.ledger = ledger
        self.limit_bytes = limit_bytes
        self.kinds = list(ledger.calls_by_kind)
        self.menus = [_undominated(menus[kind]) for kind in self.kinds]
        every = ledger.matrices
        self.over_bytes = every.fixed_bytes + ledger.base_bytes - limit_bytes
        self.held_bytes = list[NDArray[numpy.int64]]()
        self.cost_s = list[NDArray[numpy.float64]]()
        for own, menu in zip(ledger.calls_by_kind.values(), self.menus, strict=True):
            rows = numpy.outer([h.saved_bytes for h in menu], every.holds[:, own].sum(axis=1))
            rows += numpy.outer([h.forward_bytes for h in menu], every.forward[:, own].sum(axis=1))
            rows += numpy.outer([h.rise_bytes for h in menu], every.backward[:, own].sum(axis=1))
            self.held_bytes.append(rows)
            self.cost_s.append(len(own) * numpy.array([holding.cost_s for holding in menu]))

    def holdings(self, choice: _Choice) -> dict[CallKind, Holding]:
        chosen = zip(self.menus, choice, strict=True)
        return dict(zip(self.kinds, (menu[i] for menu, i in chosen), strict=True))

    def excess_and_cost(self, choice: _Choice) -> tuple[int, float]:
        """Return how far a combination exceeds the limit, then its cost."""
        cost_s = sum(costs[i] for costs, i in zip(self.cost_s, choice, strict=True))
        return max(0, int(self._over_bytes(choice).max())), float(cost_s)

    def at(self, fraction: float) -> _Choice:
        """Return the cheapest combination in which each kind saves at most such a fraction."""
        choice = list[int]()
        ends = {kind: _ends(menu) for kind, menu in zip(self.kinds, self.menus, strict=True)}
        saved = {k: least + round(fraction * (most - least)) for k, (least, most) in ends.items()}
        rooms = self.ledger.rooms(saved, self.limit_bytes)
        for kind, menu in zip(self.kinds, self.menus, strict=True):
            fitting = [
                (holding.cost_s, i)
                for i, holding in enumerate(menu)
                if holding.saved_bytes <= saved[kind] and holding.peak_bytes <= rooms[kind]
            ]
            least = min((holding.saved_bytes, i) for i, holding in enumerate(menu))
            choice.append(min(fitting, default=least)[1])
        return tuple(choice)

    def exchanged(self, choice: _Choice) -> _Choice:
        """Return a combination that no exchange of one or two kinds' holdings improves."""
        places = range(len(self.kinds))
        pairs = [*combinations(places, 2)] or [(place, place) for place in places]
        before = None
        while choice != before:
            before = choice
            for pair in pairs:
                choice = min(choice, self._exchanged_at(choice, pair), key=self.excess_and_cost)
        return choice

    def neighbours(self, choice: _Choice) -> list[_Choice]:
        """Return the best combinations that differ in the holding of one kind only."""
        return [self._exchanged_at(choice, (place, place)) for place in range(len(self.kinds))]

    def _exchanged_at(self, choice: _Choice, places: tuple[int, int]) -> _Choice:
        """Return the best combination that differs at two places only."""
        first, last = places
        over = self._over_bytes(choice) - self.held_bytes[first][choice[first]]
        peaks, costs = over + self.held_bytes[first][:, None], self.cost_s[first][:, None]
        if first != last:
            peaks = peaks - self.held_bytes[last][choice[last]] + self.held_bytes[last]
            costs = costs + self.cost_s[last]
        over = numpy.maximum(peaks.max(axis=2), 0)
        least = numpy.where(over == over.min(), costs, numpy.inf).argmin()
        own, other = numpy.unravel_index(least, over.shape)
        found = {last: int(other), first: int(own)}  # the first if both are the same
        return tuple(found.get(place, i) for place, i in enumerate(choice))

    def _over_bytes(self, choice: _Choice) -> NDArray[numpy.int64]:
        """Return how far each interval exceeds the limit."""
        held = (rows[i] for rows, i in zip(self.held_bytes, choice, strict=True))
        return sum(held, start=self.over_bytes)


def _ends(menu: Menu) -> tuple[int, int]:
    """Return the least and the most that holdings save."""
    saved = [holding.saved_bytes for holding in menu]
    return min(saved), max(saved)


def _undominated(menu: Menu) -> list[Holding]:
    """Return the holdings of a menu that are better than any other in some figure."""
    best: dict[tuple[float, ...], Holding] = {}
    for holding in sorted(menu, key=_figures):
        own = _figures(holding)
        if not any(all(a <= b for a, b in zip(other, own, strict=True)) for other in best):
            best[own] = holding
    return list(best.values())


def _figures(holding: Holding) -> tuple[float, ...]:
    return holding.cost_s, holding.saved_bytes, holding.forward_bytes, holding.rise_bytes
