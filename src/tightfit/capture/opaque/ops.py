"""Calls of an eagerly run module as the ops of a plan: what they return, what they cost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from tightfit.capture.calls.geometry import Geometry
from tightfit.capture.opaque.call import Block
from tightfit.capture.opaque.record import Result
from tightfit.capture.reads.python_state import PythonState
from tightfit.costs.measured.call import Measurement, PeakFunction, fixed_generators, measure_call
from tightfit.errors import PlanMismatch

__all__ = ["BlockBackward", "BlockForward"]

_SECONDS = 0.12  # for the timing of one call


@dataclass(frozen=True)
class BlockForward:
    """Runs a block's forward inside a program: outputs, then the record."""

    block: Block

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Return the tensors the module returns and the record of its backward."""
        profile = self.block.profile
        assert profile is not None
        buffers = () if profile.pinned else tuple(self.block.module.buffers())
        before = [b._version for b in buffers]
        result = self.block.forward(tensors)
        if any(b._version != v for b, v in zip(buffers, before, strict=True)):
            raise PlanMismatch(
                f"the opaque module {self.block.name!r} changes its buffers, though it did not "
                "when it was measured: computing it again would change them twice. Move what "
                "changes them out of the module, or the module out of the fitted part"
            )
        found = tuple(Geometry.of(t) for t in result.outputs)
        alike = result.passed == profile.passed
        if found != profile.outputs or result.differentiable != profile.differentiable or not alike:
            wrong = [
                f"{tuple(a.shape)} where {tuple(b.shape)} was measured"
                for a, b in zip(found, profile.outputs, strict=False)
                if a != b
            ]
            raise PlanMismatch(
                f"the opaque module {self.block.name!r} returned other tensors than when it was "
                f"measured ({wrong[0] if wrong else 'their number or differentiability'}): its "
                "output depends on the data, which a plan cannot hold. Way out: pad to a fixed "
                "shape, or move it out of the fitted part"
            )
        now, then = result.structure.constants, profile.structure.constants
        if now != then:
            raise PlanMismatch(
                f"the opaque module {self.block.name!r} returned {now} besides its tensors, but "
                f"{then} when it was captured: a planned step would go on with the old values. "
                "Return tensors, or move it out of the fitted part"
            )
        return [*result.outputs, result.record] if self.block.has_record else result.outputs

    def measure(self, measure_peak: PeakFunction) -> Measurement:
        """Return what the forward costs, over some draws where they decide."""
        block = self.block
        tensors = [o.real() for o in block.operands]
        buffers = {n: t.clone() for n, t in block.module.named_buffers()}

        def run(seed: int) -> list[Any]:
            block.seed(seed)
            return _everything(block.forward(tensors, buffers))

        with PythonState({"": block.module}):
            return _over_draws(
                [_measured(block, run, (seed,), measure_peak) for seed in block.draws]
            )


def _measured(
    block: Block, call: Callable[..., Any], arguments: tuple[Any, ...], measure_peak: PeakFunction
) -> Measurement:
    """Return what a call costs, timed the shorter the more draws there are."""
    return measure_call(
        call,
        arguments,
        device=block.device,
        measure_peak=measure_peak,
        seconds=_SECONDS / len(block.draws),
    )


def _over_draws(measured: Sequence[Measurement]) -> Measurement:
    """Return the mean time and the largest workspace of runs with several draws."""
    return msgspec.structs.replace(
        measured[0],
        cost_s=statistics.fmean(each.cost_s for each in measured),
        workspace_bytes=max(each.workspace_bytes for each in measured),
    )


def _everything(result: Result) -> list[Any]:
    return [*result.outputs, result.record]


@dataclass(frozen=True)
class BlockBackward:
    """Runs a block's backward inside a program.

    Parameters
    ----------
    present : tuple of int
        The outputs that have a gradient.
    """

    block: Block
    present: tuple[int, ...]

    def __call__(
        self, record: Any, saved: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the operands, those left out that never have one."""
        expected = self.block.gradients[self.present]
        retain = self.present in self.block.retained
        gradients = self.block.backward(record, saved, tangents, self.present, retain=retain)
        operands = [o for o in self.block.operands if o.requires_grad]
        for operand, layout, gradient in zip(operands, expected, gradients, strict=True):
            if operand.parameter is None and (layout is None) != (gradient is None):
                raise PlanMismatch(
                    f"the opaque module {self.block.name!r} differentiates with respect to other "
                    "inputs than when it was captured: which ones depends on the data, which a "
                    "plan cannot hold. Way out: move it out of the fitted part"
                )
        return [g for g, layout in zip(gradients, expected, strict=True) if layout is not None]

    def measure(self, measure_peak: PeakFunction) -> Measurement:
        """Return what the backward costs; the record is freed while it runs.

        Where less is held so than its results and the record together, as a plan counts them, the
        record is kept to the end instead: the plan has made room for it, and foretells the peak.
        """
        seeds = self.block.draws
        with fixed_generators(self.block.device), PythonState({"": self.block.module}):
            timed = [self._timed(seed, measure_peak) for seed in seeds]
            workspaces = [self._workspace(t, measure_peak, retain=False) for t in enumerate(timed)]
            if min(workspaces) < 0:
                self.block.retained.add(self.present)
                workspaces = [
                    self._workspace(t, measure_peak, retain=True) for t in enumerate(timed)
                ]
        return msgspec.structs.replace(_over_draws(timed), workspace_bytes=max(0, *workspaces))

    def _timed(self, seed: int, measure_peak: PeakFunction) -> Measurement:
        block = self.block
        block.seed(seed)
        record, saved, tangents = block.ready(self.present)

        def run() -> list[torch.Tensor | None]:
            return block.backward(record, saved, tangents, self.present, retain=True)

        return _measured(block, run, (), measure_peak)

    def _workspace(
        self, timed: tuple[int, Measurement], measure_peak: PeakFunction, *, retain: bool
    ) -> int:
        """Return what a backward holds at its peak besides its results, above its begin."""
        block = self.block
        seed, measurement = timed
        block.seed(seed)
        record, saved, tangents = block.ready(self.present)
        _, peak = measure_peak(
            lambda: block.backward(record, saved, tangents, self.present, retain=retain),
            device=block.device,
        )
        return peak.peak_bytes - sum(measurement.output_bytes)
