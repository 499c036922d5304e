"""PyTorch's own methods on a captured step, as rows next to those of the planners."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from tightfit.capture.captured import Captured
from tightfit.capture.partitioner import Schedule, checkpoint_schedules, min_cut_schedule
from tightfit.errors import BadInput
from tightfit.plan.plan import Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.outcomes import Bound, finish, no_plan, simulated
from tightfit.planners.questions.compare import ComparisonRow, comparison_row
from tightfit.units import format_bytes

_MIN_CUT, _SHARE = "pytorch.min_cut", "pytorch.activation_memory_budget"
_CHECKPOINT = "pytorch.checkpoint"
PYTORCH_METHODS = (_MIN_CUT, _SHARE, _CHECKPOINT)
"""The min-cut partitioner, the same with its memory budget, and a checkpoint per block."""

_TENTHS = 10


def refuse_unknown_methods(names: Sequence[str]) -> None:
    for name in names:
        if name not in PYTORCH_METHODS:
            known = ", ".join(PYTORCH_METHODS)
            raise BadInput(f"PyTorch has no method called {name!r} (known: {known})")


class PyTorchMethods:
    """PyTorch's own methods on one captured step, with the partitioner's choices kept.

    No method takes a budget in bytes: the cheapest of its settings that fits is taken. Settings
    are activation memory budgets from 0.9 down to 0, and checkpointed blocks by the depth of their
    names.
    """

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._partitions: dict[float, Schedule] = {}

    def row(self, name: str, task: Task, limits: Limits) -> ComparisonRow:
        """Return the row of a method on a task, whose graph is that of the captured step."""
        started = time.perf_counter()
        try:
            outcome = self._outcome(name, task, limits, started)
        except BadInput as error:
            outcome = no_plan(started=started, proven=False, note=str(error))
            return comparison_row(task, name, outcome, "refused")
        return comparison_row(task, name, outcome, outcome.status)

    def _outcome(self, name: str, task: Task, limits: Limits, started: float) -> Outcome:
        fitting: list[tuple[float, Schedule]] = []
        peaks: list[tuple[int, str]] = []
        for schedule in self._schedules(name):
            result = simulated(task, schedule.computes)
            peaks.append((result.peak_bytes, schedule.setting))
            if result.peak_bytes <= task.budget_bytes:
                fitting.append((result.cost_s, schedule))
            out_of_time = time.perf_counter() - started > limits.seconds
            if out_of_time or (fitting and name != _CHECKPOINT):
                break
        if not fitting:
            peak_bytes, setting = min(peaks)
            note = f"needs {format_bytes(peak_bytes)} with {setting}"
            return no_plan(started=started, proven=False, note=note)
        _, chosen = min(fitting, key=lambda pair: pair[0])
        return finish(
            task,
            list(chosen.computes),
            bound=Bound(0.0, "trivial"),
            started=started,
            gap=limits.gap,
            note=chosen.setting,
        )

    def _schedules(self, name: str) -> Iterator[Schedule]:
        """Yield the schedules of a method, the cheapest first except for checkpoints."""
        if name == _CHECKPOINT:
            yield from checkpoint_schedules(self._captured)
            return
        tenths = (_TENTHS,) if name == _MIN_CUT else range(_TENTHS - 1, -1, -1)
        for share in (tenth / _TENTHS for tenth in tenths):
            if share not in self._partitions:
                self._partitions[share] = min_cut_schedule(self._captured, share)
            yield self._partitions[share]
