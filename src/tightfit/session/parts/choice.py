"""Plans for the parts of a model within one budget: their search and their choice.

One number says how far each kind of part goes from the least to the most that it may save. For each
of the values tried, plans are searched that keep to it. Which of them run is said by the rule for
all steps of several calls (`step/shares.py`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from tightfit.plan.plan import Outcome, Plan
from tightfit.plan.verify import verify
from tightfit.planners.apart import plan_each_apart
from tightfit.planners.base import Limits, Task
from tightfit.planners.registry import plan_with
from tightfit.progress import Progress
from tightfit.session.options import Options
from tightfit.session.parts.kind_plans import KindPlans
from tightfit.session.step.holding import Holding, holding_of, overhead_of
from tightfit.session.step.ledger import StepLedger
from tightfit.session.step.shares import by_call, by_kind

_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
_AT_ONCE_S = 1.0
_AT_ONCE_SHARES = (0.5, 1.0, 0.25, 0.75)
_FINER = (-0.09375, -0.0625, -0.03125, 0.03125, 0.0625, 0.09375)  # around the largest that fits


@dataclass(frozen=True)
class PartPlans:
    """Plans for the calls of a step."""

    kinds: Mapping[KindPlans, Holding]  # with which all calls fit
    calls: tuple[Holding, ...]  # for each call of the step: the same, or a cheaper one
    menus: Mapping[KindPlans, Sequence[Holding]]  # holdings of the plans found for each kind

    @property
    def overhead(self) -> float:
        """Extra cost of the calls over nothing recomputed, a fraction."""
        return overhead_of(self.calls)

    def for_step(self, ledger: StepLedger[KindPlans], limit_bytes: int) -> PartPlans:
        """Return the choice for another step of the same kinds."""
        return replace(self, calls=by_call(ledger, limit_bytes, self.kinds, self.menus))


def choose(
    ledger: StepLedger[KindPlans], limit_bytes: int, options: Options, *, apart: bool = False
) -> PartPlans | None:
    """Return the plans that make a step cheapest within a limit.

    `limit_bytes`: bytes held at the begin of the step included. `options`: say which planner
    searches, and how long. `apart`: whether another process searches, while this process trains.
    Returns None if no choice was found that fits.
    """
    seconds = options.limits.seconds / (2 * len(_SHARES) + len(_FINER))
    menus = _Menus(ledger, limit_bytes, options, seconds, apart=apart)
    fits = menus.extend(_SHARES)
    largest = max(itertools.compress(_SHARES, fits), default=0.0)
    menus.extend([max(0.0, largest + step) for step in _FINER])
    kinds = by_kind(ledger, limit_bytes, menus.plans)
    if kinds is None:
        return None
    menus.extend_around(kinds)
    return PartPlans(kinds, (), menus.plans).for_step(ledger, limit_bytes)


def choose_at_once(
    ledger: StepLedger[KindPlans], limit_bytes: int, options: Options
) -> PartPlans | None:
    """Return the cheapest choice out of plans found before and plans found in a second.

    `ledger`, `limit_bytes`, `options`: as `choose` takes them. Returns None if no choice was found
    that fits.
    """
    started = time.perf_counter()
    parts = len(_AT_ONCE_SHARES) * max(1, len(set(ledger.calls)))
    menus = _Menus(ledger, limit_bytes, options, _AT_ONCE_S / parts)
    for share in _AT_ONCE_SHARES:
        if time.perf_counter() - started < _AT_ONCE_S:
            menus.extend([share])
    kinds = by_kind(ledger, limit_bytes, menus.plans)
    return (
        None if kinds is None else PartPlans(kinds, (), menus.plans).for_step(ledger, limit_bytes)
    )


@dataclass(frozen=True)
class _Wanted:
    """A plan for a kind of part that saves so much, and holds so much at its peak, at most."""

    kind: KindPlans
    saved_bytes: int
    room_bytes: int

    @property
    def task(self) -> Task | None:
        """The problem to plan; None: there is no room, or the plan is known."""
        if self.room_bytes <= 0 or self.may_keep_everything:
            return None
        graph = self.kind.graph
        outside_bytes = max(0, self.room_bytes - self.saved_bytes - self.kind.most.output_bytes)
        return Task(
            graph=graph.with_outside(outside_bytes),
            budget_bytes=graph.constant_bytes + self.room_bytes,
        )

    @property
    def may_keep_everything(self) -> bool:
        """Whether the plan that keeps everything will do."""
        most = self.kind.most
        return most.saved_bytes <= self.saved_bytes and most.peak_bytes <= self.room_bytes


class _Menus:
    """The plans found for each kind of part of a step, for this step or others.

    `ledger`, `limit_bytes`, `options`: as `choose` takes them. `apart`: whether another process
    seeks it.
    """

    def __init__(
        self,
        ledger: StepLedger[KindPlans],
        limit_bytes: int,
        options: Options,
        seconds: float,
        *,
        apart: bool = False,
    ) -> None:
        self.ledger = ledger
        self.limit_bytes = limit_bytes
        self.options = options
        self.limits = msgspec.structs.replace(options.limits, seconds=seconds)
        self.plan = plan_each_apart if apart else _plan_each_here
        self.plans = {kind: kind.menu for kind in ledger.calls}

    def extend(self, shares: Sequence[float]) -> list[bool]:
        """Plan every kind to save each share of the most it can; say which fit together."""
        wanted = [each for share in shares for each in self._wanted(share)]
        found = self._found(wanted)
        count = len(self.plans)
        return [self._fit(found[i * count : (i + 1) * count]) for i in range(len(shares))]

    def _wanted(self, share: float) -> list[_Wanted]:
        saved = {kind: _saved_bytes(kind, share) for kind in self.plans}
        rooms = self.ledger.rooms(saved, self.limit_bytes)
        return [_Wanted(kind, saved[kind], rooms[kind]) for kind in self.plans]

    def _fit(self, holdings: Sequence[Holding | None]) -> bool:
        """Whether there is a holding for every kind, and all fit together."""
        found = zip(self.plans, holdings, strict=True)
        chosen = {kind: holding for kind, holding in found if holding is not None}
        is_complete = len(chosen) == len(self.plans)
        return is_complete and self.ledger.peak_with(chosen) <= self.limit_bytes

    def extend_around(self, chosen: Mapping[KindPlans, Holding]) -> None:
        """Plan kinds to save more while all other calls run the chosen plans."""
        saved = {kind: holding.saved_bytes for kind, holding in chosen.items()}
        rooms = self.ledger.rooms(saved, self.limit_bytes)
        more = ((kind, _saved_bytes(kind, share)) for kind in self.plans for share in _SHARES)
        self._found([_Wanted(k, own, rooms[k]) for k, own in more if own > saved[k]])

    def _found(self, wanted: Sequence[_Wanted]) -> list[Holding | None]:
        """Return the cheapest plan found of each that is wanted; all are in the menus then."""
        tasks = {place: each.task for place, each in enumerate(wanted)}
        open_tasks = {place: task for place, task in tasks.items() if task is not None}
        name, progress = self.options.planner, self.options.progress
        outcomes = self.plan(name, [*open_tasks.values()], self.limits, progress)
        planned = dict(zip(open_tasks, outcomes, strict=True))
        return [self._noted(each, planned.get(place)) for place, each in enumerate(wanted)]

    def _noted(self, wanted: _Wanted, outcome: Outcome | None) -> Holding | None:
        kind = wanted.kind
        if outcome is None:
            found = kind.most if wanted.room_bytes > 0 else None
        else:
            found = None if outcome.plan is None else holding_of(kind.graph, outcome.plan)
        if found is not None:
            kind.note(found)
            self.plans[kind].append(found)
        return found


def _plan_each_here(
    name: str, tasks: Sequence[Task], limits: Limits, progress: Progress
) -> list[Outcome]:
    """Plan tasks in this process, one after the other."""
    return [plan_with(name, task, limits, progress) for task in tasks]


def _saved_bytes(kind: KindPlans, share: float) -> int:
    """Return a share of the way from the least to the most that a part may save."""
    least, most = kind.least.saved_bytes, kind.most.saved_bytes
    return least + round(share * max(0, most - least))


class PartPlansMessage(msgspec.Struct, frozen=True):
    """The choice of one rank; kinds of parts have the same names on all of them."""

    # For each kind the plans in use; the first is the plan with which all calls fit
    plans: dict[str, list[Plan]]
    calls: list[int]  # for each call of the step which of its kind's plans it runs

    @classmethod
    def of(cls, choice: PartPlans | None, ledger: StepLedger[KindPlans]) -> PartPlansMessage:
        """Return the message about a choice for a step; of none if nothing was found."""
        if choice is None:
            return cls({}, [])
        used = {kind: [holding] for kind, holding in choice.kinds.items()}
        for kind, holding in zip(ledger.calls, choice.calls, strict=True):
            if holding not in used[kind]:
                used[kind].append(holding)
        return cls(
            {kind.name: [holding.plan for holding in holdings] for kind, holdings in used.items()},
            [used[k].index(h) for k, h in zip(ledger.calls, choice.calls, strict=True)],
        )

    def plans_for(self, ledger: StepLedger[KindPlans]) -> PartPlans | None:
        """Return the choice for the same step on another rank; None if there is none.

        Raises `InvalidPlan` if a plan does not verify here.
        """
        if not self.plans:
            return None
        kinds = {kind.name: kind for kind in ledger.calls}
        menus = {}
        for name, plans in self.plans.items():
            graph = kinds[name].graph
            for plan in plans:
                verify(plan, graph)
            menus[kinds[name]] = [holding_of(graph, plan) for plan in plans]
        calls = (menus[kind][i] for kind, i in zip(ledger.calls, self.calls, strict=True))
        return PartPlans({kind: found[0] for kind, found in menus.items()}, tuple(calls), menus)
