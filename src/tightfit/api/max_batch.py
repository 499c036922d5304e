"""The largest batch of a model that trains within a budget, found without running it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tightfit.errors import BadInput, InfeasibleBudget, InvalidPlan, PlanMismatch
from tightfit.graph.ir import Graph
from tightfit.plan.plan import Gradients, Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.questions.batch import (
    MOST_BATCH,
    LargestBatch,
    largest_batch,
    largest_batch_without_plan,
    no_batch,
)
from tightfit.planners.questions.rescale import extrapolated, rescaled
from tightfit.planners.registry import DEFAULT, plan_with
from tightfit.progress import SILENT, Progress
from tightfit.session.memory.budget import usable_bytes
from tightfit.studies.dry_step import graph_of
from tightfit.studies.model import Target
from tightfit.units import format_bytes, parse_bytes

__all__ = ["MaxBatch", "max_batch_size"]

_SAMPLES = (4, 8)  # batch sizes from which others are estimated
_RESERVE = 0.02  # of the budget, unless a reserve is given
_TRIAL_S = 2.0  # to plan each estimated batch size
_STEP_DOWN = 0.98  # from a batch whose captured step does not fit


class MaxBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The largest batch found, and the plan that shows that it fits.

    Parameters
    ----------
    batch : int
        Examples per batch.
    eager_batch : int
        The largest batch that fits with nothing recomputed; 0 if none does.
    budget_bytes, reserve_bytes : int
        What was asked, constants included, and the part of it that the plan leaves unused.
    outcome : Outcome
        The plan of the step captured at `batch`.
    graph : Graph
        That step.
    too_large : int or None
        The smallest batch for which no plan was found, by estimate; None if none was.
    seconds : float
        Wall time of everything.
    """

    batch: int
    eager_batch: int
    budget_bytes: int
    reserve_bytes: int
    outcome: Outcome
    graph: Graph
    too_large: int | None
    seconds: float


def max_batch_size(
    target: Target,
    *,
    budget: int | str,
    max_overhead: float = float("inf"),
    reserve: int | str | None = None,
    optimizer: str = "adamw",
    costs: str = "cpu",
    gradients: Gradients = "fresh",
    planner: str = DEFAULT,
    limits: Limits | None = None,
    progress: Progress = SILENT,
    **model_options: Any,
) -> MaxBatch:
    """Find the largest batch within a budget on fake tensors: nothing runs, no memory is taken.

    The step is captured at two batch sizes and estimated at others; at the answer it is captured
    again and planned, so that the answer is verified and not extrapolated.

    Parameters
    ----------
    target : str or callable
        A model's name (``"zoo:gpt2"``, ``"my/file.py:factory"``) or a factory that takes
        ``batch=``.
    budget : int or str
        The budget, constants included.
    max_overhead : float
        The largest acceptable extra compute, a fraction.
    reserve : int or str, optional
        Bytes of the budget to leave unused; by default 2 % of it.
    optimizer, costs, gradients, planner, **model_options
        As for `tightfit.check`.
    limits : Limits
        Of the plan at the answer.

    Raises
    ------
    InfeasibleBudget
        If not even a batch of 1 fits.
    BadInput
        For a target without ``batch=``, or an option that cannot be used.
    CaptureError
        If the model cannot be captured; names the module, the reason and a way out.
    """
    started = time.perf_counter()
    asked = parse_bytes(budget)
    spared = int(_RESERVE * asked) if reserve is None else _spared(reserve, asked)
    if not max_overhead >= 0:
        raise BadInput(f"max_overhead must be a fraction such as 0.2, got {max_overhead}")
    if model_options.pop("batch", None) is not None:
        raise BadInput("the batch size is what is looked for: leave out batch")

    @functools.cache
    def captured(batch: int) -> Graph:
        return graph_of(
            target,
            optimizer=optimizer,
            costs=costs,
            gradients=gradients,
            progress=progress,
            batch=batch,
            **model_options,
        )

    estimated = _estimate(captured)
    limits = limits or Limits()
    search = _Search(captured, estimated, asked - spared, max_overhead, gradients, planner, limits)
    try:
        found, graph = search.run(progress)
    except InfeasibleBudget as error:
        parts = f"the budget of {format_bytes(asked)} less a reserve of {format_bytes(spared)}"
        raise InfeasibleBudget(f"{error} ({parts})", budget_bytes=asked) from None
    return MaxBatch(
        batch=found.batch,
        eager_batch=largest_batch_without_plan(estimated, asked - spared, gradients=gradients),
        budget_bytes=asked,
        reserve_bytes=spared,
        outcome=found.outcome,
        graph=graph,
        too_large=found.too_large,
        seconds=time.perf_counter() - started,
    )


def _spared(reserve: int | str, budget_bytes: int) -> int:
    spared = parse_bytes(reserve, what="reserve") if reserve else 0
    return budget_bytes - usable_bytes(budget_bytes, spared)


def _estimate(captured: Callable[[int], Graph]) -> Callable[[int], Graph]:
    """What gives the step of a batch size in no time; the capture itself where steps differ."""
    small, large = _SAMPLES
    try:
        return functools.cache(extrapolated(captured(small), captured(large), _SAMPLES))
    except PlanMismatch:
        return captured


class _Search:
    """The search over estimated steps, and the proof by a captured one."""

    def __init__(
        self,
        captured: Callable[[int], Graph],
        estimated: Callable[[int], Graph],
        budget_bytes: int,
        max_overhead: float,
        gradients: Gradients,
        planner: str,
        limits: Limits,
    ) -> None:
        self.captured = captured
        self.estimated = estimated
        self.budget_bytes = budget_bytes
        self.max_overhead = max_overhead
        self.gradients: Gradients = gradients
        self.planner = planner
        self.limits = limits

    def run(self, progress: Progress) -> tuple[LargestBatch, Graph]:
        """Return the largest batch whose captured step has a plan, and that step."""
        most, too_large = MOST_BATCH, None
        while True:
            found = self.guess(most, progress)
            graph = self.captured(found.batch)
            outcome = self.planned(found, graph, progress)
            if outcome is not None:
                too_large = too_large or found.too_large
                return msgspec.structs.replace(found, outcome=outcome, too_large=too_large), graph
            if found.batch == 1:
                raise no_batch(self.budget_bytes, self.max_overhead)
            too_large = found.batch
            most = max(1, min(found.batch - 1, int(_STEP_DOWN * found.batch)))

    def guess(self, most: int, progress: Progress) -> LargestBatch:
        """Return the largest batch by estimate."""
        return largest_batch(
            self.estimated,
            self.budget_bytes,
            max_overhead=self.max_overhead,
            gradients=self.gradients,
            limits=msgspec.structs.replace(self.limits, seconds=min(_TRIAL_S, self.limits.seconds)),
            progress=progress,
            planner=self.planner,
            most=most,
        )

    def planned(self, found: LargestBatch, graph: Graph, progress: Progress) -> Outcome | None:
        """Plan the captured step; where that fails, try the plan of the estimated one."""
        task = Task(graph=graph, budget_bytes=self.budget_bytes, gradients=self.gradients)
        outcome = plan_with(self.planner, task, self.limits, progress)
        if outcome.plan is not None and outcome.overhead <= self.max_overhead:
            return outcome
        plan = found.outcome.plan
        assert plan is not None
        try:
            outcome = rescaled(plan, self.estimated(found.batch), task)
        except (InvalidPlan, PlanMismatch):
            return None
        return outcome if outcome.overhead <= self.max_overhead else None
