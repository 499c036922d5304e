"""Run a program once without leaving a trace, and measure what it holds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tightfit.allocator import measure_peak
from tightfit.capture.lift import Captured
from tightfit.execution.lower import Program
from tightfit.plan.plan import Gradients

__all__ = ["TrialPeaks", "try_program"]


@dataclass(frozen=True)
class TrialPeaks:
    """What one run held on top of what was there before it, in bytes.

    Parameters
    ----------
    forward_bytes, boundary_bytes, backward_bytes : int
        The peak of the forward pass, what was alive behind it, the peak of the backward pass.
    """

    forward_bytes: int
    boundary_bytes: int
    backward_bytes: int

    def above_constants(self, outside_bytes: int) -> int:
        """Return the peak if user code holds so much between forward and backward."""
        return max(self.forward_bytes, self.boundary_bytes + outside_bytes, self.backward_bytes)


def try_program(
    captured: Captured, program: Program, inputs: Sequence[Any], gradients: Gradients
) -> TrialPeaks:
    """Run forward and backward once on the real tensors and measure.

    Parameters and inputs are only read; what the step would write to is copied first; generators
    are put back; gradients are kept or dropped as autograd will. The peak may lie above any
    budget: that is what is to be found out. Where memory runs out it counts as endless.

    Parameters
    ----------
    captured : Captured
        The step.
    program : Program
        A lowered plan, compiled or not.
    inputs : sequence
        The tensors of the placeholders.
    gradients : str
        Whether finished gradients stay (``"fresh"``) or are added to others (``"accumulated"``).
    """
    joint = captured.joint
    written = {position for _, position in joint.write_backs}
    given = [
        (x.detach().clone() if i in written else x.detach()) if isinstance(x, torch.Tensor) else x
        for i, x in enumerate(inputs)
    ]
    device = next((x.device for x in given if isinstance(x, torch.Tensor)), torch.device("cpu"))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        try:
            (raw, saved), forward = measure_peak(
                lambda: program.forward(list(given)), device=device
            )
            tangents = [
                torch.zeros(node.meta["val"].shape, dtype=raw[source.index].dtype, device=device)
                for node, source in zip(joint.placeholders, joint.sources, strict=True)
                if source.kind == "tangent"
            ]
            kept: list[torch.Tensor] = []

            def run() -> None:
                for group in program.backward(saved, tangents):
                    if gradients == "fresh":
                        kept.extend(group)
                    group.clear()

            held = forward.growth_bytes
            _, backward = measure_peak(run, device=device)
        except torch.OutOfMemoryError:
            return TrialPeaks(sys.maxsize // 2, sys.maxsize // 2, sys.maxsize // 2)
    return TrialPeaks(forward.peak_bytes, held, held + backward.peak_bytes)
