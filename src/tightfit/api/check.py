"""The memory needs of a model and the cost of a budget, without running it or allocating it."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from tightfit.api.requested import requested_bytes
from tightfit.graph.ir import Graph
from tightfit.graph.liveness import budget_of_ratio, eager_peak_bytes
from tightfit.layout.within import plan_within
from tightfit.plan.explain import Explanation, explain
from tightfit.plan.plan import Gradients, Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.questions.infeasible import infeasible_message
from tightfit.planners.questions.minimum import MinimumBudget
from tightfit.planners.questions.minimum import minimum_budget as minimum_of_graph
from tightfit.planners.registry import DEFAULT, find_planner, plan_with
from tightfit.progress import SILENT, Progress
from tightfit.studies.dry_step import graph_of
from tightfit.studies.model import Target

ENOUGH = 0.005
"""The gap, a fraction, at which a question whether it fits has been answered."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The memory needs of a model and the cost of a budget.

    Parameters
    ----------
    graph : Graph
        The captured step with its constants: the optimizer's assumed state among them.
    gradients : str
        ``"fresh"`` or ``"accumulated"``.
    budget_bytes, eager_peak_bytes : int
        The budget asked for, and the peak with nothing recomputed; constants included.
    outcome : Outcome
        The plan, its overhead and the proven bound.
    minimum : MinimumBudget
        The smallest budget with a plan found, and the proven lower limit.
    explanation : Explanation or None
        Holders of memory, values saved and values computed again; None without a plan.
    height_bytes : int or None
        Bytes of the plan with an address for every byte: constants and the height of its
        layout; None without a plan.
    message : str
        Why there is no plan, and what to try; empty with a plan.
    seconds : float
        Wall time of everything.
    """

    graph: Graph
    gradients: Gradients
    budget_bytes: int
    eager_peak_bytes: int
    outcome: Outcome
    minimum: MinimumBudget
    explanation: Explanation | None
    height_bytes: int | None
    message: str
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether there is a plan within the budget."""
        return self.outcome.plan is not None


def check(
    target: Target,
    *,
    budget: int | str | None = None,
    budget_ratio: float | None = None,
    optimizer: str = "adamw",
    costs: str = "cpu",
    gradients: Gradients = "fresh",
    planner: str = DEFAULT,
    limits: Limits | None = None,
    progress: Progress = SILENT,
    **model_options: Any,
) -> Check:
    """Plan a model on fake tensors: nothing runs, and no memory is taken for it.

    Parameters
    ----------
    target : str, callable or tuple
        A model's name (``"zoo:gpt2"``, ``"my/file.py:factory"``), a factory, or its result:
        ``(model, loss, args, target)``.
    budget : int or str, optional
        The budget, constants included; ``"minimum"``: the smallest with a plan found. Or
    budget_ratio : float, optional
        a share of the activation peak with nothing recomputed, on top of the constants.
    optimizer : str
        Whose state is assumed: a key of `OPTIMIZERS`.
    costs : str
        A key of `tightfit.costs.COST_SOURCES`; a GPU's also round sizes as its allocator does.
        ``"measured"`` times each distinct operator once, by itself.
    gradients : str
        Whether gradients are new in each step or added to existing ones.
    planner, limits
        Which planner, and when it stops: by default once the plan costs at most half a percent
        of the step more than is proven to be the least.
    **model_options
        As `tightfit.studies.model.ModelSettings` has them: batch, size, ...

    Raises
    ------
    BadInput
        For a target or option that cannot be used.
    CaptureError
        If the model cannot be captured; names the module, the reason and a way out.
    """
    started = time.perf_counter()
    asked = requested_bytes(budget, budget_ratio)
    find_planner(planner)  # before the capture, which takes long
    limits = limits or Limits(gap=ENOUGH)
    graph = graph_of(
        target,
        optimizer=optimizer,
        costs=costs,
        gradients=gradients,
        progress=progress,
        **model_options,
    )
    limits_of_minimum = msgspec.structs.replace(limits, seconds=min(10.0, limits.seconds))
    least = minimum_of_graph(graph, gradients, limits_of_minimum, progress)
    if budget_ratio is not None:
        asked = budget_of_ratio(graph, budget_ratio, gradients=gradients)
    task = Task(
        graph=graph, budget_bytes=least.found_bytes if asked is None else asked, gradients=gradients
    )
    laid_out, height_bytes = plan_within(
        task, lambda tighter: plan_with(planner, tighter, limits, progress, known=least.plan)
    )
    outcome = _corrected_status(laid_out)
    return Check(
        graph=graph,
        gradients=gradients,
        budget_bytes=task.budget_bytes,
        eager_peak_bytes=eager_peak_bytes(graph, gradients=gradients),
        outcome=outcome,
        minimum=least,
        explanation=explain(outcome.plan, graph) if outcome.plan is not None else None,
        height_bytes=height_bytes,
        message="" if outcome.plan is not None else infeasible_message(task, outcome, least),
        seconds=time.perf_counter() - started,
    )


def _corrected_status(outcome: Outcome) -> Outcome:
    """Call a plan optimal only if nothing is left to gain, also where a larger gap was enough to
    stop."""
    if outcome.status != "optimal" or outcome.gap <= Limits().gap:
        return outcome
    note = "; ".join(filter(None, (outcome.note, "near enough to the proven least to stop")))
    return msgspec.structs.replace(outcome, status="feasible", note=note)


def minimum_budget(
    target: Target,
    *,
    optimizer: str = "adamw",
    costs: str = "cpu",
    gradients: Gradients = "fresh",
    limits: Limits | None = None,
    progress: Progress = SILENT,
    **model_options: Any,
) -> MinimumBudget:
    """Find the smallest budget of a model on fake tensors: nothing runs, no memory is taken.

    Parameters and errors are those of `check`.

    Returns
    -------
    MinimumBudget
        The smallest budget with a plan found, its plan, and the proven lower limit.
    """
    graph = graph_of(
        target,
        optimizer=optimizer,
        costs=costs,
        gradients=gradients,
        progress=progress,
        **model_options,
    )
    return minimum_of_graph(graph, gradients, limits, progress)
