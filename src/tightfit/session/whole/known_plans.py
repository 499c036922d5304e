"""The known plans of a step, from which a new search begins."""

from __future__ import annotations

from collections.abc import Iterable

from tightfit.graph.ir import Graph
from tightfit.plan.plan import Gradients, Plan
from tightfit.plan.renumbered import renumbered


class KnownPlans:
    """Plans of a step for any surroundings; each is verified before it is used again."""

    def __init__(self, earlier: Iterable[Plan] = ()) -> None:
        self._smallest: dict[Gradients, Plan] = {}
        self._least_kept: dict[Gradients, Plan] = {}
        self._retired = tuple(earlier)  # by other costs

    def smallest(self, gradients: Gradients) -> Plan | None:
        """Return the plan of the smallest budget so far.

        It may serve where a planner finds none after costs, assumptions or the budget changed.
        """
        return self._smallest.get(gradients)

    def least_kept(self, gradients: Gradients) -> Plan | None:
        """Return the plan that keeps least between forward and backward, if it was searched."""
        return self._least_kept.get(gradients)

    def all(self) -> tuple[Plan, ...]:
        """Return the plans of the smallest budgets, and those made with earlier costs."""
        return (*self._smallest.values(), *self._retired)

    @property
    def has_retired(self) -> bool:
        """Whether the step ran by plans made with earlier costs, here or in an earlier process."""
        return bool(self._retired)

    def remember(self, plan: Plan) -> None:
        """Remember a plan unless a plan within a smaller budget is known."""
        known = self._smallest.get(plan.gradients)
        if known is None or plan.budget_bytes <= known.budget_bytes:
            self._smallest[plan.gradients] = plan

    def remember_least_kept(self, plan: Plan) -> None:
        """Remember the plan that keeps least between forward and backward."""
        self._least_kept[plan.gradients] = plan

    def retire(self, plans: Iterable[Plan]) -> None:
        """Remember the plans that ran, in place of others made with earlier costs."""
        self._retired = tuple(plans)

    def renumber_alternatives(
        self, running: Iterable[Plan], before: Graph, with_postponed: Graph, after: Graph
    ) -> None:
        """Retire all plans, with the numbers of alternatives in another graph of the step.

        `with_postponed`: the graph of the plans that keep least.
        """
        least_kept = _renumbered(after, with_postponed, self._least_kept.values())
        self._retired = _renumbered(after, before, (*running, *self.all()))
        self._least_kept = {plan.gradients: plan for plan in least_kept}
        self._smallest = {}


def _renumbered(after: Graph, before: Graph, plans: Iterable[Plan]) -> tuple[Plan, ...]:
    found = (renumbered(plan, before, after) for plan in plans)
    return tuple(plan for plan in found if plan is not None)
