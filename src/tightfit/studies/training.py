"""Training steps of a workload, their losses, hashes and memory."""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Callable

import msgspec
import numpy
import torch

from tightfit.allocator.devices import seconds_of
from tightfit.errors import BadInput
from tightfit.execution.guard import Guard, StepPeaks
from tightfit.session.fitted import Fitted
from tightfit.studies.workload import Workload

_UNLIMITED = 1 << 60


class TrainingRecord(msgspec.Struct):
    """The results of a series of steps."""

    losses: list[float] = []
    digests: list[dict[str, bytes]] = []
    peak_bytes: int = 0  # the highest of a step from the second on
    program_bytes: int = 0  # the highest of the planned part of a step
    planned_bytes: int = 0  # planned for the step with the highest `program_bytes`
    constant_bytes: int = 0
    first_s: float = 0.0  # seconds of the first step

    def add_step(self, peaks: StepPeaks, planned_bytes: int) -> None:
        """Record the memory of a step, and the peak that was planned for it."""
        self.peak_bytes = max(self.peak_bytes, peaks.peak_bytes)
        if peaks.program_bytes > self.program_bytes:
            self.program_bytes, self.planned_bytes = peaks.program_bytes, planned_bytes
        self.constant_bytes = peaks.constant_bytes


def train(workload: Workload, steps: int, planned: Fitted | None = None) -> TrainingRecord:
    """Run optimizer steps from the first state; record peaks from the second step on.

    `planned`: what runs the loss, if it is fitted; without it a guard made here measures peaks.
    """
    workload.reset()
    guard = Guard(workload.device.type, "warn") if planned is None else None
    record = TrainingRecord()
    _seed_all(workload.seed)
    for index in range(steps):
        workload.model.zero_grad(set_to_none=True)
        gc.collect()
        began = time.perf_counter()
        loss = _step(workload, guard)
        if index == 0:
            record.first_s = time.perf_counter() - began
        peaks = planned.close_step() if guard is None else guard.close()
        if peaks is not None and index > 0:
            record.add_step(peaks, planned_bytes_of(planned) if planned else 0)
        record.losses.append(loss)
        record.digests.append(workload.digests())
    return record


def planned_bytes_of(planned: Fitted) -> int:
    """Return the peak that was planned for the last step; 0 where nothing was."""
    with contextlib.suppress(BadInput):
        return planned.report().planned_peak_bytes
    return 0


def _seed_all(seed: int) -> None:
    """Seed every generator that a model may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def _step(workload: Workload, guard: Guard | None) -> float:
    if guard is not None:
        guard.before_forward(workload.constant_bytes, _UNLIMITED)
    loss = workload.loss_of(*workload.args, **workload.kwargs)
    if guard is not None:
        guard.after_forward()
    loss.backward()
    if guard is not None:
        guard.after_backward()
    workload.optimizer.step()
    return float(loss.detach())


def step_time(workload: Workload, function: Callable[..., torch.Tensor]) -> float:
    """Run a forward and a backward; return seconds of CPU time, or of device time on a GPU."""
    workload.model.zero_grad(set_to_none=True)
    gc.collect()
    return seconds_of(
        lambda: function(*workload.args, **workload.kwargs).backward(), workload.device
    )


def differing_parts(eager: TrainingRecord, planned: TrainingRecord) -> tuple[str, ...]:
    """Return the losses, gradients, parameters and buffers that differ in any bit."""
    found: dict[str, None] = {}
    for index, (a, b) in enumerate(zip(eager.losses, planned.losses, strict=True)):
        if a != b and not (a != a and b != b):
            found[f"loss of step {index + 1}"] = None
    for index, (a, b) in enumerate(zip(eager.digests, planned.digests, strict=True)):
        for key in sorted({*a, *b}):
            if a.get(key) != b.get(key):
                found.setdefault(f"{key} (first in step {index + 1})")
    return tuple(found)
