"""The first plan in milliseconds: relieve the fullest stage, then fill the room left."""

from __future__ import annotations

import time

from tightfit._core import _engine
from tightfit.plan.assemble import keep_everything
from tightfit.plan.plan import Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.bounds import working_set_bytes
from tightfit.planners.engine.build import build_problem
from tightfit.planners.engine.problem import computes_of
from tightfit.planners.outcomes import finish, no_plan, simulated
from tightfit.progress import Progress
from tightfit.units import format_bytes

_SLICE_S = 0.1  # between two reports of progress
_ATTEMPTS = 8  # randomised descents if the first gets stuck


def plan_greedy(task: Task, limits: Limits, progress: Progress) -> Outcome:
    """Plan by greedy descent below the budget (docs/search.md, "The first plan").

    The bound is trivial: the cost of required ops, or infeasible if one op alone needs more than
    the budget.
    """
    started = time.perf_counter()
    easy = fits_without_recomputation(task, limits, started) or prove_by_working_set(task, started)
    if easy is not None:
        return easy
    problem = build_problem(task, alternatives=False)
    schedule = _engine.Schedule(problem.engine, problem.budget_bytes)
    progress.start("greedy plan", at_most_s=limits.seconds)
    try:
        found = descend(schedule, limits, progress, started)
    except KeyboardInterrupt:
        found = False
    finally:
        progress.stop()
    if not found:
        return no_plan(started=started, proven=False, note="the greedy descent got stuck")
    computes = computes_of(problem, schedule.computes())
    return finish(task, computes, started=started, gap=limits.gap)


def fits_without_recomputation(task: Task, limits: Limits, started: float) -> Outcome | None:
    """Return the outcome that recomputes nothing, if it fits the budget.

    It is optimal unless alternatives are faster than the defaults.
    """
    computes = keep_everything(task.graph)
    if simulated(task, computes).peak_bytes > task.budget_bytes:
        return None
    return finish(task, computes, started=started, gap=limits.gap)


def prove_by_working_set(task: Task, started: float) -> Outcome | None:
    """Return the proof of infeasibility if one op alone needs more than the budget."""
    least, op = working_set_bytes(task.graph, task.gradients)
    if least <= task.budget_bytes:
        return None
    where = "constants" if op is None else f"op {op} ({task.graph.ops[op].target})"
    return no_plan(
        started=started,
        proven=True,
        bound_source="working set",
        note=f"{where} alone needs {least} bytes ({format_bytes(least)}), constants included",
    )


def descend(schedule: _engine.Schedule, limits: Limits, progress: Progress, started: float) -> bool:
    """Bring a schedule that keeps everything below its budget; return whether it fits.

    The first descent tries every resident value at each step; if it gets stuck, randomised ones
    follow, each from the start.
    """
    for attempt in range(_ATTEMPTS):
        search = _engine.Search(schedule, limits.seed + attempt, _engine.Settings())
        if attempt:
            schedule.keep_everything()
        if _run_down(search, attempt, limits, progress, started):
            left = limits.seconds - (time.perf_counter() - started)
            search.fill(3, 1 << 30, False, max(_SLICE_S, left))
            schedule.commit()
            return True
        if time.perf_counter() - started > limits.seconds:
            return False
    return schedule.fits


def _run_down(
    search: _engine.Search, attempt: int, limits: Limits, progress: Progress, started: float
) -> bool:
    relief = _engine.Relief.OUT_OF_TIME
    step = 0
    while relief == _engine.Relief.OUT_OF_TIME:
        progress.update(step, f"descent {attempt + 1}")
        is_first = attempt == 0
        relief = search.relieve(1000 if is_first else 24, 1 << 30, is_first, _SLICE_S)
        step += 1
        if time.perf_counter() - started > limits.seconds:
            break
    return relief == _engine.Relief.FITS
