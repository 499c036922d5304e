"""Steps at addresses of the allocator's choice, and the interface of addresses."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from tightfit.arenas.calls import Caller
from tightfit.errors import InfeasibleBudget
from tightfit.execution.runtime import Runner
from tightfit.graph.ir import Graph
from tightfit.plan.plan import Plan
from tightfit.session.options import Options
from tightfit.session.report import Report
from tightfit.session.step.graphs_of_step import Planned


class PlanRejected(Exception):
    """A plan does not run: another is to be made."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options


class DefaultAddresses:
    """Steps at addresses that the allocator chooses."""

    def end_step(self) -> None:
        """End the step before: work until the next begins belongs to none."""

    def begin_step(self, shape: Hashable, caller: Caller) -> None:
        """Begin a step that is called by its shape, and by the plan that it runs.

        `caller`: while a call of it awaits its backward, the step goes on.
        """

    def runner_for(self, number: int, graph: Graph, plan: Plan, runner: Runner) -> Runner:
        """Return the runner of a plan at the addresses of its steps.

        `number`: tells the plan from all others.
        """
        return runner

    def accept(self, planned: Planned, options: Options) -> Options:
        """Accept the plan that is to run, or return other options to plan with."""
        return options

    def note_parts(self) -> None:
        """Note that steps are planned part by part from now on."""

    def awaits_a_plan(self, options: Options) -> bool:
        """Whether the first step is to be planned before memory of the process is measured."""
        return False

    def looking_bytes(self, options: Options) -> int:
        """Return bytes to leave of a budget while operators are tried, for other than tensors."""
        return 0

    def look(self, inputs: Iterable[Any], options: Options) -> Options:
        """Measure memory of the process between two steps; return options for plans.

        `inputs`: of the call that comes; tensors among them count. `options`: as they are now;
        returned where nothing is to change.
        """
        return options

    def giving_way(self, options: Options, error: InfeasibleBudget) -> Options:
        """Return the options with less left, where no plan does with so little.

        Raises `InfeasibleBudget`: the error, if nothing was left.
        """
        raise error

    def added_to(self, report: Report) -> Report:
        """Return a report with figures of the arena, and memory of the process for it."""
        return report

    def leave(self) -> None:
        """Give the arena back, once nothing in it is alive."""
