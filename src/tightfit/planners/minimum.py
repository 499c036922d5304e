"""The least budget: what no plan can go below, and the smallest for which a plan is found."""

from __future__ import annotations

import time

import msgspec

from tightfit.graph.ir import Graph
from tightfit.plan.assemble import assemble, keep_everything
from tightfit.plan.plan import Gradients, Plan
from tightfit.plan.simulate import simulate
from tightfit.planners.base import Limits, Task
from tightfit.planners.bounds import working_set_bytes
from tightfit.planners.registry import DEFAULT, plan_with
from tightfit.progress import SILENT, Progress
from tightfit.units import format_bytes

__all__ = ["MinimumBudget", "minimum_budget"]

_RESOLUTION = 1000  # the search ends when this part of the activation peak is left
_SHARE = 8  # one attempt may take this part of the time


class MinimumBudget(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about the least budget.

    Parameters
    ----------
    lower_bytes : int
        Proven: no plan needs less, constants included.
    found_bytes : int
        The smallest budget for which a plan is known.
    plan : Plan
        That plan.
    seconds : float
        Wall time spent.
    """

    lower_bytes: int
    found_bytes: int
    plan: Plan
    seconds: float


def minimum_budget(
    graph: Graph,
    gradients: Gradients = "fresh",
    limits: Limits | None = None,
    progress: Progress = SILENT,
    *,
    planner: str = DEFAULT,
) -> MinimumBudget:
    """Bisect for the smallest budget for which a planner finds a plan (planning.md, section 9).

    Parameters
    ----------
    graph : Graph
        The step, validated.
    gradients : str
        ``"fresh"`` or ``"accumulated"``.
    limits : Limits
        Of the whole search; interrupting it returns what is known by then.
    planner : str
        The planner that is asked at each budget.
    """
    limits = limits or Limits()
    started = time.perf_counter()
    lower_bytes, _ = working_set_bytes(graph, gradients)
    best = assemble(graph, keep_everything(graph), budget_bytes=0, gradients=gradients)
    found_bytes = simulate(graph, best).peak_bytes
    failed_bytes = lower_bytes - 1
    resolution = max(1, (found_bytes - graph.constant_bytes) // _RESOLUTION)
    progress.start("least budget")
    try:
        while found_bytes - failed_bytes > resolution:
            left = limits.seconds - (time.perf_counter() - started)
            if left <= 0:
                break
            progress.update(0, f"{format_bytes(failed_bytes)} to {format_bytes(found_bytes)}")
            middle = (
                lower_bytes if failed_bytes < lower_bytes else (failed_bytes + found_bytes) // 2
            )
            attempt = msgspec.structs.replace(
                limits, seconds=min(left, limits.seconds / _SHARE), gap=float("inf")
            )
            task = Task(graph=graph, budget_bytes=middle, gradients=gradients)
            outcome = plan_with(planner, task, attempt, progress)
            if outcome.plan is None:
                failed_bytes = middle
                if outcome.status == "infeasible":
                    lower_bytes = max(lower_bytes, middle + 1)
            else:
                best, found_bytes = outcome.plan, outcome.peak_bytes
    except KeyboardInterrupt:
        progress.update(0, "interrupted")
    finally:
        progress.stop()
    return MinimumBudget(
        lower_bytes=lower_bytes,
        found_bytes=found_bytes,
        plan=msgspec.structs.replace(best, budget_bytes=found_bytes),
        seconds=time.perf_counter() - started,
    )
