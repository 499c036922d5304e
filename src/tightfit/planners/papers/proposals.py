"""Take the cheapest schedule that fits among those a heuristic proposes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

from tightfit.plan.plan import Compute, Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.outcomes import finish, no_plan, simulated
from tightfit.progress import Progress, shown
from tightfit.units import format_bytes


def cheapest_that_fits(
    task: Task,
    proposals: Iterable[list[Compute]],
    limits: Limits,
    progress: Progress,
    *,
    title: str,
) -> Outcome:
    """Return the cheapest proposed schedule within the budget; the bound is the trivial one.

    Proposals are judged one by one until they end, time is up, one without recomputation fits,
    or the user interrupts. The first proposal is always judged.
    """
    started = time.perf_counter()
    best: list[Compute] | None = None
    best_cost_s = least_bytes = float("inf")
    tried = 0
    with contextlib.suppress(KeyboardInterrupt), shown(progress, title):
        for computes in proposals:
            result = simulated(task, computes)
            tried += 1
            least_bytes = min(least_bytes, result.peak_bytes)
            if result.peak_bytes <= task.budget_bytes and result.cost_s < best_cost_s:
                best, best_cost_s = computes, result.cost_s
            progress.update(tried)
            if (best and not result.recomputed) or time.perf_counter() - started > limits.seconds:
                break
    if best is None:
        least = (
            "no proposal was judged"
            if tried == 0
            else (f"the least of {tried} proposals needs {format_bytes(int(least_bytes))}")
        )
        return no_plan(started=started, proven=False, note=least)
    return finish(task, best, started=started, gap=limits.gap)
