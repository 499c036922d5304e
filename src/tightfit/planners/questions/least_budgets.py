"""Least budgets of one step in many surroundings: a search begins where earlier ones ended."""

from __future__ import annotations

from collections import deque

from tightfit.graph.ir import Graph
from tightfit.plan.plan import Gradients, Plan
from tightfit.planners.base import Limits
from tightfit.planners.questions.minimum import FoundSchedule, MinimumBudget, minimum_budget
from tightfit.progress import SILENT, Progress

_MOST = 8  # schedules that are kept


class LeastBudgets:
    """Searches for the least budget of a step, and the schedules that they found."""

    def __init__(self) -> None:
        self._found: deque[FoundSchedule] = deque(maxlen=_MOST)

    def find(
        self,
        graph: Graph,
        gradients: Gradients = "fresh",
        limits: Limits | None = None,
        progress: Progress = SILENT,
    ) -> MinimumBudget:
        """Find the least budget of the step with other memory around it, or with other ways."""
        least = minimum_budget(graph, gradients, limits, progress, tuple(self._found))
        self.learn(least)
        return least

    def within(
        self, graph: Graph, gradients: Gradients, limits: Limits, budget_bytes: int
    ) -> Plan | None:
        """Return a plan of the step within a budget; None: none was found."""
        least = minimum_budget(
            graph, gradients, limits, earlier=tuple(self._found), asked_bytes=budget_bytes
        )
        self.learn(least)
        return least.plan if least.found_bytes <= budget_bytes else None

    def learn(self, least: MinimumBudget) -> None:
        """Begin later searches from the schedule of a search that ended elsewhere."""
        if least.schedule is not None:
            self._found.append(least.schedule)
