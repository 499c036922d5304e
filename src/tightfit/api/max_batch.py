"""The largest batch of a model that trains within a budget, found without running it."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from tightfit.errors import BadInput, InfeasibleBudget
from tightfit.graph.ir import Graph
from tightfit.plan.plan import Gradients, Outcome
from tightfit.planners.base import Limits
from tightfit.planners.questions.batch import proven_batch
from tightfit.planners.questions.request import PlanRequest
from tightfit.planners.registry import DEFAULT, find_planner
from tightfit.progress import SILENT, Progress
from tightfit.session.memory.budget import usable_bytes
from tightfit.studies.dry_step import graph_of
from tightfit.studies.model import Target
from tightfit.units import format_bytes, parse_bytes

_RESERVE = 0.02  # of the budget, unless a reserve is given


class MaxBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The largest batch found, and the plan that shows that it fits.

    Parameters
    ----------
    batch : int
        Examples per batch.
    eager_batch : int
        The largest batch that fits with nothing recomputed; 0 if none does.
    budget_bytes, reserve_bytes : int
        The budget asked for, constants included, and the part of it that the plan leaves unused.
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
    find_planner(planner)  # before any capture, which takes long
    asked = parse_bytes(budget)
    spared = int(_RESERVE * asked) if reserve is None else _spared(reserve, asked)
    if not max_overhead >= 0:
        raise BadInput(f"max_overhead must be a fraction such as 0.2, got {max_overhead}")
    if model_options.pop("batch", None) is not None:
        raise BadInput("the batch size is searched: leave out batch")

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

    try:
        found = proven_batch(
            captured,
            PlanRequest(asked - spared, gradients, planner, limits or Limits(), max_overhead),
            progress,
        )
    except InfeasibleBudget as error:
        parts = f"the budget of {format_bytes(asked)} less a reserve of {format_bytes(spared)}"
        raise InfeasibleBudget(f"{error} ({parts})", budget_bytes=asked) from None
    return MaxBatch(
        batch=found.batch,
        eager_batch=found.without_plan,
        budget_bytes=asked,
        reserve_bytes=spared,
        outcome=found.outcome,
        graph=found.graph,
        too_large=found.too_large,
        seconds=time.perf_counter() - started,
    )


def _spared(reserve: int | str, budget_bytes: int) -> int:
    spared = parse_bytes(reserve, what="reserve") if reserve else 0
    return budget_bytes - usable_bytes(budget_bytes, spared)
