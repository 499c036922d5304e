"""Several planners on the same graph at the same budgets, side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import Event

import msgspec

from tightfit.errors import BadInput, MissingExtra
from tightfit.plan.plan import Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.outcomes import no_plan
from tightfit.planners.registry import PLANNERS, find_planner, plan_with
from tightfit.progress import SILENT, Progress, StoppableProgress, shown


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one planner at one budget."""

    # graph, planner: names
    graph: str
    planner: str
    budget_bytes: int  # constants included
    status: str  # that of the outcome, or ``"refused"`` if the planner cannot plan this graph
    # overhead, bound, gap: fractions; None where there is no plan, or no bound because
    # infeasibility is proven
    overhead: float | None
    bound: float | None
    gap: float | None
    peak_bytes: int | None  # the simulated peak of the plan, constants included
    seconds: float  # wall time of the planner
    # bound_source, note: which bound it is; why there is no plan
    bound_source: str = ""
    note: str = ""


def planners_named(names: str) -> tuple[str, ...]:
    """Return the planners of a comma-separated list; ``"all"`` names every registered planner.

    Raises `BadInput` for an unknown name.
    """
    if names == "all":
        return tuple(PLANNERS)
    return tuple(find_planner(name.strip()).name for name in names.split(","))


def compare(
    tasks: Sequence[Task], planners: Sequence[str], limits: Limits, progress: Progress = SILENT
) -> tuple[ComparisonRow, ...]:
    """Run every planner on every task; return rows by task, then planner, as they are given.

    `limits.workers` planners run at a time, each with one worker; solvers are processes of their
    own. A planner that cannot plan the graph, or lacks its extra, gives a row that says so. An
    interruption ends running planners with the best so far and leaves out those not begun.
    """
    jobs = [(task, planner) for task in tasks for planner in planners]
    alone = msgspec.structs.replace(limits, workers=1)
    interrupted = Event()
    rows: dict[int, ComparisonRow] = {}
    with (
        shown(progress, "compare planners", len(jobs)),
        ThreadPoolExecutor(max(1, limits.workers)) as pool,
    ):
        running = {
            pool.submit(compared, task, planner, alone, StoppableProgress(interrupted)): number
            for number, (task, planner) in enumerate(jobs)
        }
        _collect(running, rows, progress, interrupted)
    return tuple(rows[number] for number in sorted(rows))


def compared(
    task: Task, planner: str, limits: Limits, progress: Progress = SILENT
) -> ComparisonRow:
    started = time.perf_counter()
    try:
        outcome = plan_with(planner, task, limits, progress)
    except (BadInput, MissingExtra) as error:
        outcome = no_plan(started=started, proven=False, bound_source="", note=str(error))
        return comparison_row(task, planner, outcome, "refused")
    return comparison_row(task, planner, outcome, outcome.status)


def comparison_row(task: Task, planner: str, outcome: Outcome, status: str) -> ComparisonRow:
    """Return an outcome as a row; `status` is its own or ``"refused"``."""
    is_planned = outcome.plan is not None
    return ComparisonRow(
        graph=task.graph.name,
        planner=planner,
        budget_bytes=task.budget_bytes,
        status=status,
        overhead=outcome.overhead if is_planned else None,
        bound=outcome.bound if math.isfinite(outcome.bound) else None,
        gap=outcome.gap if is_planned else None,
        peak_bytes=outcome.peak_bytes if is_planned else None,
        seconds=outcome.seconds,
        bound_source=outcome.bound_source,
        note=outcome.note,
    )


def _collect(
    running: dict[Future[ComparisonRow], int],
    rows: dict[int, ComparisonRow],
    progress: Progress,
    interrupted: Event,
) -> None:
    """Take in rows as they finish; on an interruption end running jobs and drop waiting ones."""
    pending = set(running)
    while pending:
        try:
            done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
            rows.update((running[future], future.result()) for future in done)
            last = [f"{row.planner}: {row.status}" for row in rows.values()][-1:]
            progress.update(len(rows), *last)
        except KeyboardInterrupt:
            interrupted.set()
            pending = {future for future in pending if not future.cancel()}
    rows.update((running[f], f.result()) for f in running if not f.cancelled())
