"""A request for plans of a step, independent of the batch size."""

from __future__ import annotations

import math

import msgspec

from tightfit.graph.ir import Graph
from tightfit.plan.plan import Gradients, Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.registry import DEFAULT, plan_with
from tightfit.progress import Progress


class PlanRequest(msgspec.Struct, frozen=True):
    """A budget, and how plans within it are looked for."""

    budget_bytes: int  # constants included
    gradients: Gradients = "fresh"
    planner: str = DEFAULT
    limits: Limits = Limits()  # of each plan
    max_overhead: float = math.inf  # the largest acceptable overhead, a fraction

    def task(self, graph: Graph) -> Task:
        return Task(graph=graph, budget_bytes=self.budget_bytes, gradients=self.gradients)

    def planned(self, graph: Graph, progress: Progress) -> Outcome:
        return plan_with(self.planner, self.task(graph), self.limits, progress)

    def accepts(self, outcome: Outcome) -> bool:
        """Whether there is a plan, and its overhead is acceptable."""
        return outcome.plan is not None and outcome.overhead <= self.max_overhead
