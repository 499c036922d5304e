"""Run programs of a step without side effects, and measure their memory and time."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tightfit.allocator import measure_peak
from tightfit.allocator.devices import fixed_generators, seconds_of
from tightfit.capture.captured import Captured
from tightfit.execution.lower import Program
from tightfit.plan.plan import Gradients

_MOST_ROUNDS = 9
_FEWEST_ROUNDS = 3
_ENOUGH_S = 5.0  # of running all programs, beyond the fewest rounds


@dataclass(frozen=True)
class TrialPeaks:
    """The peaks of one run, in bytes on top of its start."""

    # forward_bytes, boundary_bytes, backward_bytes: the peak of the forward pass, bytes alive after
    # it, the peak of the backward pass
    forward_bytes: int
    boundary_bytes: int
    backward_bytes: int

    def above_constants(self, outside_bytes: int) -> int:
        """Return the peak if user code holds so much between forward and backward."""
        return max(self.forward_bytes, self.boundary_bytes + outside_bytes, self.backward_bytes)


def try_program(
    captured: Captured, program: Program, inputs: Sequence[Any], gradients: Gradients
) -> TrialPeaks:
    """Run forward and backward once on the real tensors and measure their peaks.

    Parameters and inputs are only read; tensors that the step would write are copied first;
    generators are put back; gradients are kept or dropped as autograd will. The peak may be above
    any budget: the run is to find it. Where memory runs out it counts as endless.

    `program`: a lowered plan, compiled or not. `gradients`: whether finished gradients stay
    (``"fresh"``) or are added to others (``"accumulated"``).
    """
    with _without_trace(captured, inputs) as (given, device):
        try:
            (raw, saved), forward = measure_peak(
                lambda: program.forward(list(given)), device=device
            )
            tangents = _tangents(captured, raw, device)
            held = forward.growth_bytes
            _, backward = measure_peak(
                lambda: _backward(program, saved, tangents, gradients), device=device
            )
        except torch.OutOfMemoryError:
            return TrialPeaks(sys.maxsize // 2, sys.maxsize // 2, sys.maxsize // 2)
    return TrialPeaks(forward.peak_bytes, held, held + backward.peak_bytes)


def time_programs(
    captured: Captured, programs: Sequence[Program], inputs: Sequence[Any], gradients: Gradients
) -> list[float]:
    """Return the seconds that each of several programs of a step takes, forward and backward.

    They run in turns, so that other load of the machine affects all of them. Each runs twice in a
    row, so that the second run finds the heap as the first has left it. The fastest second run of
    each counts: processor time, or time of the device on a GPU. See `try_program`.
    """
    times: list[list[float]] = [[] for _ in programs]
    with _without_trace(captured, inputs) as (given, device):
        began = time.perf_counter()
        for number in range(_MOST_ROUNDS):
            if number >= _FEWEST_ROUNDS and time.perf_counter() - began > _ENOUGH_S:
                break
            for program, own in zip(programs, times, strict=True):
                run = partial(_run, captured, program, given, device, gradients)
                run()
                own.append(seconds_of(run, device))
    return [min(own) for own in times]


@contextlib.contextmanager
def _without_trace(
    captured: Captured, inputs: Sequence[Any]
) -> Iterator[tuple[list[Any], torch.device]]:
    """Give inputs on which a step may run without changing anything, and its device."""
    written = {position for _, position in captured.joint.write_backs}
    given = [
        (x.detach().clone() if i in written else x.detach()) if isinstance(x, torch.Tensor) else x
        for i, x in enumerate(inputs)
    ]
    device = next((x.device for x in given if isinstance(x, torch.Tensor)), torch.device("cpu"))
    with fixed_generators(device), torch.no_grad():
        yield given, device


def _run(
    captured: Captured,
    program: Program,
    given: Sequence[Any],
    device: torch.device,
    gradients: Gradients,
) -> None:
    raw, saved = program.forward(list(given))
    _backward(program, saved, _tangents(captured, raw, device), gradients)


def _tangents(captured: Captured, raw: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
    return [
        torch.zeros(node.meta["val"].shape, dtype=raw[index].dtype, device=device)
        for node, index in captured.joint.tangents
    ]


def _backward(
    program: Program, saved: list[torch.Tensor], tangents: list[torch.Tensor], gradients: Gradients
) -> None:
    """Run the backward pass; gradients stay or go as autograd will let them."""
    kept: list[torch.Tensor] = []
    for group in program.backward(saved, tangents):
        if gradients == "fresh":
            kept.extend(group)
        group.clear()
