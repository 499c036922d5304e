"""What is made for one signature of a fitted callable: the captured step and its plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tightfit.capture.captured import Captured
from tightfit.execution.runtime import Runner
from tightfit.graph.ir import Graph
from tightfit.plan.plan import Gradients, Outcome, Plan
from tightfit.pricing.in_steps import Tuner
from tightfit.session.background import Search

if TYPE_CHECKING:
    from tightfit.session.whole.compile_trials import CompiledPlan

__all__ = ["Planned", "Shape"]


@dataclass
class Shape:
    """Everything made for one signature of inputs and modules.

    Parameters
    ----------
    key : tuple
        The signature, as it is once the step is captured.
    captured : Captured
        The step, priced.
    outside_bytes : int
        What user code holds between forward and backward: assumed at first, then measured.
    plans : dict
        Planned and lowered steps, by what a plan depends on besides the graph.
    known_plans : dict
        A plan for fresh and for accumulated gradients, that of the smallest budget so far: still
        there if a planner finds none after costs, assumptions or the budget changed.
    tuner : Tuner or None
        Times the first steps; None when costs are final.
    is_further : bool
        Whether another shape of the same call was there before: its first plan must not wait.
    searches : dict
        Searches for better plans that go on, by the keys of `plans`.
    """

    key: Any
    captured: Captured
    outside_bytes: int = 0
    outside_known: bool = False
    seen_outside_bytes: int = 0
    plans: dict[Any, Planned] = field(default_factory=dict)
    known_plans: dict[Gradients, Plan] = field(default_factory=dict)
    used: int = 0
    tuner: Tuner | None = None
    is_further: bool = False
    searches: dict[Any, Search] = field(default_factory=dict)

    def forget_plans(self) -> None:
        """Drop the lowered plans and end the searches for better ones."""
        self.plans.clear()
        for search in self.searches.values():
            search.cancel()
        self.searches.clear()

    def remember_plan(self, plan: Plan) -> None:
        """Keep a plan unless one within a smaller budget is known."""
        known = self.known_plans.get(plan.gradients)
        if known is None or plan.budget_bytes <= known.budget_bytes:
            self.known_plans[plan.gradients] = plan


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
