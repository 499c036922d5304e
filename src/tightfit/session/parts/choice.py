"""How the parts of a model share one budget: what each may save, what each may hold at its peak.

Parts that run one after the other hold their saved activations at the same time, but only one of
them is at its peak. Saving more in every part leaves less room for the peak of each: one number,
how far between the least and the most each part saves, is tried out. Out of the plans found so,
one of each kind of part is taken such that the step is cheapest; as many of the calls as there is
room for then run a cheaper one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from tightfit.plan.plan import Plan
from tightfit.plan.verify import verify
from tightfit.planners.apart import plan_apart
from tightfit.planners.base import Task
from tightfit.planners.registry import plan_with
from tightfit.session.options import Options
from tightfit.session.parts.kinds import Kind
from tightfit.session.parts.ledger import Holding, Ledger, holding_of, overhead_of

__all__ = ["PartPlans", "PartPlansMessage", "choose", "choose_at_once"]

_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
_AT_ONCE_S = 1.0
_AT_ONCE_SHARES = (0.5, 1.0, 0.25, 0.75)
_FINER = (-0.09375, -0.0625, -0.03125, 0.03125, 0.0625, 0.09375)  # around the largest that fits


@dataclass(frozen=True)
class PartPlans:
    """Plans for the calls of a step.

    Parameters
    ----------
    kinds : dict of Kind to Holding
        With which all calls fit.
    calls : tuple of Holding
        For each call of the step: the same, or a cheaper one.
    menus : dict of Kind to list of Holding
        What was found for each kind.
    """

    kinds: Mapping[Kind, Holding]
    calls: tuple[Holding, ...]
    menus: Mapping[Kind, Sequence[Holding]]

    @property
    def overhead(self) -> float:
        """What the calls cost more than with nothing recomputed, a fraction."""
        return overhead_of(self.calls)

    def spread(self, ledger: Ledger[Kind], limit_bytes: int) -> PartPlans:
        """Return the choice for another step of the same kinds.

        The later a part is called, the shorter it holds what it saves: the last calls of each kind
        run a cheaper plan, as many as fit.
        """
        calls = [self.kinds[kind] for kind in ledger.calls]
        for kind, plans in self.menus.items():
            own = [i for i, called in enumerate(ledger.calls) if called is kind]
            for holding in sorted(plans, key=lambda holding: holding.cost_s):
                if not own or holding.cost_s >= self.kinds[kind].cost_s:
                    break
                own, calls = _spread(ledger, limit_bytes, calls, own, holding)
        return replace(self, calls=tuple(calls))


def _spread(
    ledger: Ledger[Kind],
    limit_bytes: int,
    calls: list[Holding],
    own: list[int],
    holding: Holding,
) -> tuple[list[int], list[Holding]]:
    """Give as many calls out of some as fit another plan, the last first.

    Returns
    -------
    list of int
        The calls that did not get it.
    list of Holding
        For every call its plan.
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


def choose(
    ledger: Ledger[Kind], limit_bytes: int, options: Options, *, apart: bool = False
) -> PartPlans | None:
    """Return the plans that make a step cheapest within a limit.

    Parameters
    ----------
    ledger : Ledger
        A measured step.
    limit_bytes : int
        Above the begin of the step.
    options : Options
        Say which planner searches, and how long.
    apart : bool
        Whether another process searches: this one trains meanwhile.

    Returns
    -------
    PartPlans or None
        None if no choice was found that fits.
    """
    seconds = options.limits.seconds / (2 * len(_SHARES) + len(_FINER))
    menus = _Menus(ledger, limit_bytes, options, seconds, apart=apart)
    fitting = [share for share in _SHARES if menus.extend(share)]
    for step in _FINER:
        menus.extend(max(0.0, max(fitting, default=0.0) + step))
    kinds = menus.cheapest()
    if kinds is None:
        return None
    menus.extend_beside(kinds)
    return PartPlans(kinds, (), menus.plans).spread(ledger, limit_bytes)


def choose_at_once(ledger: Ledger[Kind], limit_bytes: int, options: Options) -> PartPlans | None:
    """Return the cheapest choice out of what was found before and what is found in a second.

    Parameters
    ----------
    ledger, limit_bytes, options : Ledger, int, Options
        As `choose` takes them.

    Returns
    -------
    PartPlans or None
        None if no choice was found that fits.
    """
    started = time.perf_counter()
    parts = len(_AT_ONCE_SHARES) * max(1, len(set(ledger.calls)))
    menus = _Menus(ledger, limit_bytes, options, _AT_ONCE_S / parts)
    for share in _AT_ONCE_SHARES:
        if time.perf_counter() - started < _AT_ONCE_S:
            menus.extend(share)
    kinds = menus.cheapest()
    return None if kinds is None else PartPlans(kinds, (), menus.plans).spread(ledger, limit_bytes)


class _Menus:
    """The plans found for each kind of part of a step, for this one or others.

    Parameters
    ----------
    ledger, limit_bytes, options : Ledger, int, Options
        As `choose` takes them.
    seconds : float
        For each plan that is sought.
    apart : bool
        Whether another process seeks it.
    """

    def __init__(
        self,
        ledger: Ledger[Kind],
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
        self.plan = plan_apart if apart else plan_with
        self.plans = {kind: kind.menu for kind in ledger.calls}
        self.uniform: list[dict[Kind, Holding]] = [{kind: kind.least for kind in self.plans}]

    def extend(self, share: float) -> bool:
        """Plan every kind to save a share of the most it can; return whether all fit together."""
        saved = {kind: _saved_bytes(kind, share) for kind in self.plans}
        chosen: dict[Kind, Holding] = {}
        for kind, plans in self.plans.items():
            room_bytes = self.ledger.room(kind, saved, self.limit_bytes)
            holding = self._planned(kind, saved[kind], room_bytes)
            if holding is not None:
                plans.append(holding)
                chosen[kind] = holding
        if len(chosen) < len(self.plans) or not self._fits(chosen):
            return False
        self.uniform.append(chosen)
        return True

    def extend_beside(self, chosen: Mapping[Kind, Holding]) -> None:
        """Plan kinds to save more while all other calls run the chosen plans."""
        saved = {kind: holding.saved_bytes for kind, holding in chosen.items()}
        for kind, plans in self.plans.items():
            room_bytes = self.ledger.room(kind, saved, self.limit_bytes)
            for share in _SHARES:
                saved_bytes = _saved_bytes(kind, share)
                if saved_bytes > chosen[kind].saved_bytes:
                    holding = self._planned(kind, saved_bytes, room_bytes)
                    if holding is not None:
                        plans.append(holding)

    def cheapest(self) -> dict[Kind, Holding] | None:
        """Return the cheapest choice found that fits, one kind changed after the other."""
        best = min(filter(self._fits, self.uniform), key=self._cost_s, default=None)
        while best is not None:
            others = [
                {**best, kind: holding}
                for kind, plans in self.plans.items()
                for holding in plans
                if holding.cost_s < best[kind].cost_s
            ]
            better = min(filter(self._fits, others), key=self._cost_s, default=None)
            if better is None:
                break
            best = better
        return best

    def _planned(self, kind: Kind, saved_bytes: int, room_bytes: int) -> Holding | None:
        """Return the cheapest plan found that keeps to what may be saved and held at the peak."""
        graph = kind.captured.graph
        outside_bytes = max(0, room_bytes - saved_bytes - kind.most.output_bytes)
        if room_bytes <= 0:
            return None
        if kind.most.saved_bytes <= saved_bytes and kind.most.peak_bytes <= room_bytes:
            return kind.most
        task = Task(
            graph=graph.with_outside(outside_bytes), budget_bytes=graph.constant_bytes + room_bytes
        )
        plan = self.plan(self.options.planner, task, self.limits, self.options.progress).plan
        if plan is None:
            return None
        found = holding_of(graph, plan)
        kind.note(found)
        return found

    def _fits(self, chosen: Mapping[Kind, Holding]) -> bool:
        return self.ledger.peak_with(chosen) <= self.limit_bytes

    def _cost_s(self, chosen: Mapping[Kind, Holding]) -> float:
        return sum(chosen[kind].cost_s for kind in self.ledger.calls)


def _saved_bytes(kind: Kind, share: float) -> int:
    """Return a share of the way from the least to the most that a part may save."""
    least, most = kind.least.saved_bytes, kind.most.saved_bytes
    return least + round(share * max(0, most - least))


class PartPlansMessage(msgspec.Struct, frozen=True):
    """What one rank has chosen; kinds of parts have the same names on all of them.

    Parameters
    ----------
    plans : dict of str to list of Plan
        For each kind the plans in use; the first is the one with which all calls fit.
    calls : list of int
        For each call of the step which of its kind's plans it runs.
    """

    plans: dict[str, list[Plan]]
    calls: list[int]

    @classmethod
    def of(cls, choice: PartPlans | None, ledger: Ledger[Kind]) -> PartPlansMessage:
        """Return what is to be told of a choice for a step; of none if nothing was found."""
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

    def plans_for(self, ledger: Ledger[Kind]) -> PartPlans | None:
        """Return the choice for the same step on another rank; None if there is none.

        Raises
        ------
        InvalidPlan
            If a plan does not verify here.
        """
        if not self.plans:
            return None
        kinds = {kind.name: kind for kind in ledger.calls}
        menus = {}
        for name, plans in self.plans.items():
            graph = kinds[name].captured.graph
            for plan in plans:
                verify(plan, graph)
            menus[kinds[name]] = [holding_of(graph, plan) for plan in plans]
        calls = (menus[kind][i] for kind, i in zip(ledger.calls, self.calls, strict=True))
        return PartPlans({kind: found[0] for kind, found in menus.items()}, tuple(calls), menus)
