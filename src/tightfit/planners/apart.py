"""Searching a plan in a process of its own: a program that trains keeps its interpreter."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence

import msgspec

from tightfit.plan.plan import Outcome, Plan
from tightfit.planners.base import Limits, Task
from tightfit.planners.child import run_in_child
from tightfit.planners.registry import plan_with
from tightfit.progress import SILENT, Progress

_LONGEST = 3.0  # times the limit of a search, and a little: it is given the processor last
_LITTLE_S = 10.0


class _PlannerRequest(msgspec.Struct, frozen=True):
    """The request to a planner in another process."""

    name: str
    tasks: Sequence[Task]
    limits: Limits
    known: Plan | None


def plan_apart(
    name: str, task: Task, limits: Limits, progress: Progress = SILENT, known: Plan | None = None
) -> Outcome:
    """As `registry.plan_with`, in another process that gives way to all others.

    Where no other process can be started, or it fails or hangs, the planner runs in this process.

    Raises `KeyboardInterrupt` if the progress does: the search is dropped.
    """
    return _planned(_PlannerRequest(name, (task,), limits, known), progress)[0]


def plan_each_apart(
    name: str, tasks: Sequence[Task], limits: Limits, progress: Progress = SILENT
) -> list[Outcome]:
    """Plan tasks one after the other in one process, as `plan_apart` does; limits are of each."""
    return _planned(_PlannerRequest(name, tasks, limits, None), progress)


def _planned(request: _PlannerRequest, progress: Progress) -> list[Outcome]:
    answers: list[Outcome] = []

    def answered(message: bytes) -> None:
        if message:
            answers.append(msgspec.msgpack.decode(message, type=Outcome))
        progress.update(len(answers))

    if request.tasks and sys.executable and not hasattr(sys, "frozen"):
        seconds = _LONGEST * request.limits.seconds * len(request.tasks) + _LITTLE_S
        with contextlib.suppress(OSError, RuntimeError):
            run_in_child(
                f"{__name__}:serve",
                msgspec.msgpack.encode(request),
                seconds=seconds,
                on_report=answered,
                gives_way=True,
            )
    left = request.tasks[len(answers) :]
    here = (plan_with(request.name, task, request.limits, progress, request.known) for task in left)
    return [*answers, *here]


def serve(payload: bytes, report: Callable[[bytes], None]) -> None:
    """Plan the tasks of the parent process and report each."""
    request = msgspec.msgpack.decode(payload, type=_PlannerRequest)
    for task in request.tasks:
        outcome = plan_with(request.name, task, request.limits, known=request.known)
        report(msgspec.msgpack.encode(outcome))
