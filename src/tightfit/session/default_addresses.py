"""The interface of addresses, and steps that the allocator places."""

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
    """A plan does not fit at its addresses: another is to be made with these options."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options


class DefaultAddresses:
    """Steps that the allocator places; base class of planned addresses."""

    def end_step(self) -> None:
        """End the step before: requests until the next begins belong to no step."""

    def begin_step(self, shape: Hashable, caller: Caller) -> None:
        """Begin a step.

        `shape`: equal for steps that make the same requests. `caller`: while a call of it awaits
        its backward, the step goes on.
        """

    def runner_for(self, number: int, graph: Graph, plan: Plan, runner: Runner) -> Runner:
        """Return a runner that places the steps of a plan.

        `number`: identifies the plan.
        """
        return runner

    def accept(self, planned: Planned, options: Options) -> Options:
        """Accept the plan that is to run, or return other options to plan with."""
        return options

    def note_parts(self) -> None:
        """Note that steps are planned part by part from now on."""

    def plans_first(self, options: Options) -> bool:
        """Whether the first step is to be planned before memory of the process is measured."""
        return False

    def measuring_bytes(self, options: Options) -> int:
        """Return bytes of a budget that operators may not take while they are measured."""
        return 0

    def measure(self, inputs: Iterable[Any], options: Options) -> Options:
        """Measure memory of the process between two steps; return the options for plans.

        `inputs`: of the next call; tensors among them count. `options`: returned as they are where
        nothing changes.
        """
        return options

    def leaving_less(self, options: Options, error: InfeasibleBudget) -> Options:
        """Return options that leave less of the budget, where no plan fits into the rest.

        Raises `InfeasibleBudget`: the given error, if nothing was left.
        """
        raise error

    def added_to(self, report: Report) -> Report:
        """Return a report with figures of the arena or the allocator."""
        return report

    def leave(self) -> None:
        """Free the arena, once nothing in it is alive."""
