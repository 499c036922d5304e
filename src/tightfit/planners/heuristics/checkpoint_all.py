"""Keep everything: what frameworks do by default (Checkmate, Table 1, first row)."""

from __future__ import annotations

from tightfit.plan.assemble import keep_everything
from tightfit.plan.plan import Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.heuristics.search import cheapest_that_fits
from tightfit.progress import Progress

__all__ = ["plan_checkpoint_all"]


def plan_checkpoint_all(task: Task, limits: Limits, progress: Progress) -> Outcome:
    """Return the plan that computes every op once, if it fits."""
    proposals = [keep_everything(task.graph)]
    return cheapest_that_fits(task, proposals, limits, progress, title="checkpoint all")
