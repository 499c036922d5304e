"""A choice of plans as ranks tell it each other."""

from __future__ import annotations

import msgspec

from tightfit.plan.plan import Plan
from tightfit.plan.verify import verify
from tightfit.session.parts.choice import Choice
from tightfit.session.parts.kinds import Kind
from tightfit.session.parts.ledger import Ledger, holding_of

__all__ = ["ToldChoice"]


class ToldChoice(msgspec.Struct, frozen=True):
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
    def of(cls, choice: Choice | None, ledger: Ledger[Kind]) -> ToldChoice:
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

    def choice(self, ledger: Ledger[Kind]) -> Choice | None:
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
        return Choice({kind: found[0] for kind, found in menus.items()}, tuple(calls), menus)
