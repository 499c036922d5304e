"""Searching a plan in a process of its own: a program that trains keeps its interpreter."""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from tightfit.plan.plan import Outcome, Plan
from tightfit.planners.base import Limits, Task
from tightfit.planners.child import run_in_child
from tightfit.planners.registry import plan_with
from tightfit.progress import SILENT, Progress

__all__ = ["plan_apart", "serve"]

_LONGEST = 3.0  # times the limit of a search, and a little: it is given the processor last
_LITTLE_S = 10.0


class _PlannerRequest(msgspec.Struct, frozen=True):
    """The request to a planner in another process."""

    name: str
    task: Task
    limits: Limits
    known: Plan | None


def plan_apart(
    name: str, task: Task, limits: Limits, progress: Progress = SILENT, known: Plan | None = None
) -> Outcome:
    """As `registry.plan_with`, in another process that gives way to all others.

    Where no other process can be started, or it fails or hangs, the planner runs in this process.

    Raises `KeyboardInterrupt` if the progress does: the search is dropped.
    """
    answers: list[Outcome] = []

    def answered(message: bytes) -> None:
        if message:
            answers.append(msgspec.msgpack.decode(message, type=Outcome))
        progress.update(len(answers))

    if sys.executable and not hasattr(sys, "frozen"):
        asked = msgspec.msgpack.encode(_PlannerRequest(name, task, limits, known))
        seconds = _LONGEST * limits.seconds + _LITTLE_S
        try:
            run_in_child(
                f"{__name__}:serve", asked, seconds=seconds, on_report=answered, gives_way=True
            )
        except (OSError, RuntimeError):
            answers.clear()
    return answers[0] if answers else plan_with(name, task, limits, progress, known)


def serve(payload: bytes, report: Callable[[bytes], None]) -> None:
    """Plan the task of the parent process and report it."""
    asked = msgspec.msgpack.decode(payload, type=_PlannerRequest)
    outcome = plan_with(asked.name, asked.task, asked.limits, known=asked.known)
    report(msgspec.msgpack.encode(outcome))
