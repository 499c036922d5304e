"""Calls of an eagerly run module as the ops of a plan: their results and costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from tightfit.allocator import measure_peak
from tightfit.allocator.devices import fixed_generators
from tightfit.allocator.refusals import unless_refused
from tightfit.capture.calls.geometry import Geometry
from tightfit.capture.opaque.call import OpaqueCall
from tightfit.capture.opaque.record import Profile, Result
from tightfit.capture.restored.python_state import PythonState
from tightfit.costs.measured.call import Measurement, measure_call, measure_once
from tightfit.errors import OpaqueChanged, OpaqueVaries, PlanMismatch

_SECONDS = 0.12  # for the timing of one call


@dataclass(frozen=True)
class OpaqueForward:
    """Runs an opaque module's forward inside a program: outputs, then the record."""

    call: OpaqueCall

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Return the tensors the module returns and the record of its backward."""
        profile = self.call.profile
        assert profile is not None
        buffers = () if profile.pinned else tuple(self.call.module.buffers())
        before = [b._version for b in buffers]
        result = self.call.forward(tensors)
        if any(b._version != v for b, v in zip(buffers, before, strict=True)):
            raise PlanMismatch(
                f"the opaque module {self.call.title!r} changes its buffers, though it did not "
                "when it was measured: computing it again would change them twice. Move the code "
                "that changes them out of the module, or the module out of the fitted part"
            )
        found = tuple(Geometry.of(t) for t in result.outputs)
        alike = result.passed == profile.passed
        self._refuse_other_ways(result, profile, tensors)
        if found != profile.outputs or result.differentiable != profile.differentiable or not alike:
            wrong = [
                f"{tuple(a.shape)} where {tuple(b.shape)} was measured"
                for a, b in zip(found, profile.outputs, strict=False)
                if a != b
            ]
            raise OpaqueVaries(
                f"the opaque module {self.call.title!r} returned other tensors than when it was "
                f"measured ({wrong[0] if wrong else 'their number or differentiability'}): its "
                "output depends on the data, which a plan cannot hold. Way out: pad to a fixed "
                "shape, or move it out of the fitted part",
                module=self.call.name,
            )
        now, then = result.structure.constants, profile.structure.constants
        if now != then:
            raise OpaqueVaries(
                f"the opaque module {self.call.title!r} returned {now} in addition to its tensors, "
                f"but {then} when it was captured: a planned step would go on with the old values. "
                "Return tensors, or move it out of the fitted part",
                module=self.call.name,
            )
        return [*result.outputs, *([result.record] if self.call.has_record else ())]

    def _refuse_other_ways(
        self, result: Result, profile: Profile, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Have another plan made where outputs are new, or have a gradient, that had not.

        Raises `OpaqueChanged` when the module is measured again, that is known.
        """
        if len(result.passed) != len(profile.passed):
            return
        call = self.call
        if any(profile.passed[i] is not None for i in result.new):
            call.seen.makes(result.new)
            returned = "a tensor of its own where it returned an input"
        elif result.differentiable != profile.differentiable:
            pairs = zip(call.operands, tensors, strict=True)
            call.seen.is_given([t for o, t in pairs if o.parameter is None])
            returned = "tensors of which others have a gradient than"
        else:
            return
        raise OpaqueChanged(
            f"the opaque module {call.title!r} returned {returned} when it was measured: that "
            "depends on the data. The plan is dropped; run the step again and a plan for this is "
            "made"
        )

    def measure(self, *, briefly: bool = False) -> Measurement:
        """Return the cost of the forward, over some draws where they decide.

        `briefly`: whether a step waits for it: it is timed roughly.
        """
        call = self.call
        tensors = [o.real() for o in call.operands]
        buffers = {n: t.clone() for n, t in call.module.named_buffers()}

        def run(seed: int) -> list[Any]:
            call.seed(seed)
            result = call.forward(tensors, buffers)
            return [*result.outputs, result.record]

        with PythonState(call.module):
            timed = [_measured(call, run, (seed,), briefly=briefly) for seed in call.draws]
        return _over_draws(timed)


def _measured(
    call: OpaqueCall, run: Callable[..., Any], arguments: tuple[Any, ...], *, briefly: bool
) -> Measurement:
    """Return the cost of a run of a call, timed the shorter the more draws there are.

    Where a limit has no room for outputs of several runs, it is timed roughly, too.
    """
    if briefly:
        return measure_once(run, arguments, {}, device=call.device)
    seconds = _SECONDS / len(call.draws)
    measured = unless_refused(
        lambda: measure_call(run, arguments, device=call.device, seconds=seconds)
    )
    return measured or measure_once(run, arguments, {}, device=call.device)


def _over_draws(measured: Sequence[Measurement]) -> Measurement:
    """Return the mean time and the largest workspace of runs with several draws."""
    return msgspec.structs.replace(
        measured[0],
        cost_s=statistics.fmean(each.cost_s for each in measured),
        workspace_bytes=max(each.workspace_bytes for each in measured),
    )


@dataclass(frozen=True)
class OpaqueBackward:
    """Runs an opaque module's backward inside a program."""

    call: OpaqueCall
    present: tuple[int, ...]  # the outputs that have a gradient
    # The results that are added to gradients of other readers of the same tensor
    added: tuple[int, ...] = ()
    # The layout of each of these earlier gradients: their sums have the same
    before: tuple[Geometry, ...] = ()

    def __call__(
        self,
        record: Any,
        saved: Sequence[torch.Tensor],
        tangents: Sequence[torch.Tensor],
        before: Sequence[torch.Tensor] = (),
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the operands, those left out that never have one.

        `before`: gradients of others for each result in `added`. Autograd adds up one reader
        after the other; sums of sums have other last bits.
        """
        expected = self.call.backwards[self.present].gradients
        sums = self._sums(before)
        gradients = self.call.backward(record, saved, tangents, self.present, sums=sums)
        operands = [o for o in self.call.operands if o.requires_grad]
        for operand, geometry, gradient in zip(operands, expected, gradients, strict=True):
            if operand.parameter is None and (geometry is None) != (gradient is None):
                raise PlanMismatch(
                    f"the opaque module {self.call.title!r} differentiates with respect to other "
                    "inputs than when it was captured: which ones depends on the data, which a "
                    "plan cannot hold. Way out: move it out of the fitted part"
                )
        return [g for g, geometry in zip(gradients, expected, strict=True) if geometry is not None]

    def _sums(self, before: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return earlier gradients by place among the operands' gradients."""
        places = [i for i, g in enumerate(self.call.backwards[self.present].gradients) if g]
        return {places[n]: tensor for n, tensor in zip(self.added, before, strict=True)}

    def _made_before(self) -> dict[int, torch.Tensor]:
        return self._sums([geometry.materialised() for geometry in self.before])

    def measure(self, *, briefly: bool = False) -> Measurement:
        """Return the cost of the backward; the record is freed while it runs.

        That may hold less than its results and the record together, as a plan counts them.

        `briefly`: whether a step waits for it: it is timed roughly.
        """
        seeds = self.call.draws
        with fixed_generators(self.call.device), PythonState(self.call.module):
            timed = [self._timed(seed, briefly=briefly) for seed in seeds]
            workspaces = [self._workspace(t) for t in enumerate(timed)]
        return msgspec.structs.replace(_over_draws(timed), workspace_bytes=max(0, *workspaces))

    def _timed(self, seed: int, *, briefly: bool) -> Measurement:
        call = self.call
        call.seed(seed)
        record, saved, tangents = call.ready(self.present)
        sums = self._made_before()

        def run() -> list[torch.Tensor | None]:
            return call.backward(record, saved, tangents, self.present, retain=True, sums=sums)

        return _measured(call, run, (), briefly=briefly)

    def _workspace(self, timed: tuple[int, Measurement]) -> int:
        """Return the peak of a backward without its results, above its begin."""
        call = self.call
        seed, measurement = timed
        call.seed(seed)
        record, saved, tangents = call.ready(self.present)
        sums = self._made_before()
        _, peak = measure_peak(
            lambda: call.backward(record, saved, tangents, self.present, sums=sums),
            device=call.device,
        )
        return peak.peak_bytes - sum(measurement.output_bytes)
