"""A plan at once for a shape of inputs not seen before: the best of what costs no search."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import msgspec

from tightfit.errors import InvalidPlan, PlanMismatch
from tightfit.graph.fingerprint import fingerprint
from tightfit.plan.plan import Outcome, Plan
from tightfit.planners.base import Limits, Task
from tightfit.planners.registry import plan_with
from tightfit.session.options import Options
from tightfit.session.stages import cached_outcome, judged

__all__ = ["quick_outcome"]

_GREEDY_S = 1.0


def quick_outcome(
    task: Task, options: Options, others: Iterable[Plan]
) -> tuple[Outcome | None, bool]:
    """Return the best plan that is at hand in a fraction of a second.

    Candidates are the plan that an earlier process kept, a greedy one, and those of other shapes,
    each verified on this graph.

    Parameters
    ----------
    task : Task
        The step at its new shape.
    options : Options
        The user's; they name the cache.
    others : iterable of Plan
        Plans of the same callable at other shapes or costs.

    Returns
    -------
    outcome : Outcome or None
        None if none of them fits.
    is_final : bool
        Whether it is what the full search had found before.
    """
    known = cached_outcome(task, options)
    if known is not None:
        return known, True
    greedy = plan_with("greedy", task, Limits(seconds=_GREEDY_S))
    found = [greedy] if greedy.plan is not None else []
    for plan in others:
        moved = msgspec.structs.replace(plan, graph=fingerprint(task.graph))
        if plan.gradients == task.gradients:
            with contextlib.suppress(InvalidPlan, PlanMismatch):
                found.append(judged(task, moved))
    return min(found, key=lambda outcome: outcome.overhead, default=None), False
