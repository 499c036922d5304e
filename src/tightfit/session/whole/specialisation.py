"""One captured step of a fitted callable, and its plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tightfit.capture.captured import Captured
from tightfit.execution.runtime import Runner
from tightfit.graph.fingerprint import fingerprint
from tightfit.graph.ir import Graph
from tightfit.plan.plan import Gradients, Outcome, Plan
from tightfit.pricing.in_steps import StepCosts, Tuner, recall, remember, with_step_costs
from tightfit.progress import Progress
from tightfit.session.background import Search, searching
from tightfit.session.memory.surroundings import Surroundings, assumed_outside_bytes
from tightfit.session.options import Options
from tightfit.session.processes import agreed
from tightfit.session.whole.compile_trials import CompiledPlan

__all__ = ["Planned", "Specialisation"]


@dataclass(frozen=True)
class Planned:
    """A plan ready to run.

    Parameters
    ----------
    graph : Graph
        What was planned, with what lies around the step.
    outcome : Outcome
        The plan.
    runner : Runner
        Runs it.
    compiled : CompiledPlan or None
        What was measured of the compiled plan; None: it runs operator by operator.
    beats_compiled : bool
        Whether it runs operator by operator because that was faster than compiled plans.
    """

    graph: Graph
    outcome: Outcome
    runner: Runner
    compiled: CompiledPlan | None = None
    beats_compiled: bool = False

    @property
    def compiled_peak_bytes(self) -> int | None:
        """The measured peak of the compiled plan; None: it runs operator by operator."""
        return self.compiled.peak_bytes(self.graph) if self.compiled is not None else None


class Specialisation:
    """Everything made for one signature of inputs and modules, and for what data decided.

    Parameters
    ----------
    key : tuple
        The signature, as it is once the step is captured.
    captured : Captured
        The step, priced.
    is_further : bool
        Whether another one of the same call was there before: its first plan must not wait.

    Attributes
    ----------
    outside_bytes : int
        What user code holds between forward and backward: assumed at first, then measured.
    tuner : Tuner or None
        Times the first steps; None when costs are final.
    used : int
        The number of the last call that used it.
    """

    def __init__(self, key: Any, captured: Captured, *, is_further: bool = False) -> None:
        self.key = key
        self.captured = captured
        self.is_further = is_further
        self.outside_bytes = assumed_outside_bytes(captured)
        self.tuner: Tuner | None = None
        self.used = 0
        self._seen_outside_bytes: int | None = None
        self._plans: dict[Surroundings, Planned] = {}
        self._known: dict[Gradients, Plan] = {}
        self._searches: dict[Surroundings, Search] = {}

    def use(self, call: int) -> None:
        """Note which call uses it."""
        self.used = call

    # -- plans --------------------------------------------------------------------------------

    @property
    def plans(self) -> Mapping[Surroundings, Planned]:
        """The plans that are ready to run, by what they were made for."""
        return MappingProxyType(self._plans)

    def seen_around(self, around: Surroundings) -> Surroundings:
        """Return for what to plan: for what user code was seen to hold, unless a plan is there."""
        if around in self._plans or self._seen_outside_bytes is None:
            return around
        return around.with_outside(max(around.outside_bytes, self._seen_outside_bytes))

    def take(self, around: Surroundings, planned: Planned) -> Planned:
        """Run this plan from now on where the same lies around the step; return it."""
        self._plans[around] = planned
        return planned

    def forget_plans(self) -> None:
        """Drop the plans that are ready to run and end the searches for better ones."""
        self._plans.clear()
        for search in self._searches.values():
            search.cancel()
        self._searches.clear()

    def known_plan(self, gradients: Gradients) -> Plan | None:
        """Return the plan of the smallest budget so far.

        It is still there if a planner finds none after costs, assumptions or the budget changed.
        """
        return self._known.get(gradients)

    @property
    def known_plans(self) -> tuple[Plan, ...]:
        """The plans of the smallest budgets so far, for fresh and for accumulated gradients."""
        return tuple(self._known.values())

    def remember_plan(self, plan: Plan) -> None:
        """Keep a plan unless one within a smaller budget is known."""
        known = self._known.get(plan.gradients)
        if known is None or plan.budget_bytes <= known.budget_bytes:
            self._known[plan.gradients] = plan

    # -- searches in the background -----------------------------------------------------------

    def search(self, around: Surroundings, plan: Callable[[Progress], Outcome]) -> None:
        """Begin to search a better plan while training goes on with the one at hand."""
        self._searches[around] = Search(plan)

    def ended_search(self, around: Surroundings) -> Search | None:
        """Return the search for a better plan if it has just ended; it is returned once."""
        search = self._searches.get(around)
        if search is None or not search.is_done:
            return None
        return self._searches.pop(around)

    @property
    def searches(self) -> Mapping[Surroundings, Search]:
        """The searches that go on or whose plan was not taken yet."""
        return MappingProxyType(self._searches)

    # -- learning -----------------------------------------------------------------------------

    def recall_costs(self, options: Options) -> None:
        """Use costs from steps of an earlier process, else time the first steps of this one."""
        graph = self.captured.graph
        own = recall(graph) if options.cache else None
        key = f"kept costs {fingerprint(graph)}"
        costs = agreed(options.ranks, key, StepCosts | None, lambda: own)
        if costs is None:
            self.tuner = Tuner(searching)
        else:
            self.captured = self.captured.with_graph(with_step_costs(graph, costs))

    def use_step_costs(self, options: Options) -> None:
        """Put costs from real steps in place of isolated ones, once; plans are made anew."""
        if self.tuner is None or not self.tuner.is_ready:
            return
        graph = self.captured.graph
        costs = agreed(
            options.ranks, f"step costs {fingerprint(graph)}", StepCosts, self.tuner.costs
        )
        if options.cache:
            remember(graph, costs)
        self.captured = self.captured.with_graph(with_step_costs(graph, costs))
        self.tuner = None
        self.forget_plans()

    @property
    def outside_is_known(self) -> bool:
        """Whether it was seen what user code holds between forward and backward."""
        return self._seen_outside_bytes is not None

    def saw_outside(self, outside_bytes: int) -> None:
        """Note what user code holds; plans that are there stay in use."""
        self._seen_outside_bytes = outside_bytes

    def plan_with_outside(self, outside_bytes: int) -> None:
        """Make the next plan for what user code was seen to hold."""
        self.outside_bytes = outside_bytes
