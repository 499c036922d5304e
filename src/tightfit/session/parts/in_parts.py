"""The way out for a model that allows no single graph: its parts are found as they run.

The outermost forward runs as plain Python, and so does that of every inner module that cannot be
captured. The modules inside them are captured and planned each by itself.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from tightfit.allocator.resident import granularity_of, resident_tensor_bytes
from tightfit.capture.around_data import has_parts
from tightfit.capture.calls.signature import flatten, input_signature
from tightfit.capture.captured import Captured
from tightfit.capture.side_effects.generators import GeneratorStates
from tightfit.capture.traced_call import TracedCall
from tightfit.errors import (
    BadInput,
    CaptureError,
    CompileError,
    NothingToTrain,
    without_frames,
)
from tightfit.execution.guard import StepPeaks
from tightfit.progress import announce
from tightfit.session.memory.account import (
    device_of_modules,
    gradient_bytes,
    lasting_bytes,
    library_bytes,
    optimizer_state_bytes,
)
from tightfit.session.memory.budget import limit_bytes
from tightfit.session.parts.stand_ins import StandIns
from tightfit.session.parts.steps import Steps
from tightfit.session.report import Report
from tightfit.session.stages import capture_step_around_data

if TYPE_CHECKING:
    from tightfit.session.whole.steps import Session

__all__ = ["Fallback", "refuse_to_prepare", "run_in_parts"]


class Fallback:
    """Runs the forward of a session, whatever parts of it can be planned by their plans.

    Parameters
    ----------
    session, reason : Session, CaptureError
        Whose function cannot be captured, and why; raised again if no part can be either.
    """

    def __init__(self, session: Session, reason: CaptureError) -> None:
        if session.options.shared is not None:
            raise BadInput(
                f"{session.name} can only be planned part by part, which takes a budget of its "
                f"own, not a shared one: {reason}"
            )
        limit_bytes(session)  # what the device has free now, if the user asked for that
        without_frames(reason)
        self.session = session
        self.reason = reason
        self.device = str(device_of_modules(session.modules))
        self.granularity = granularity_of(self.device)
        gc.collect()  # what is freed during a step would look like room
        self.steps = Steps(
            session.name,
            session.options,
            self.device,
            self._constant_bytes,
            self._capture,
            coming=self._coming_bytes,
            wanted=f"make {session.name} a model that can be planned as a whole: {reason}",
        )
        if self.steps.guard.meter is None:
            raise reason
        self.stand_ins = StandIns(session.modules, self.steps, outermost=session.root is None)
        self._leaves: list[Any] = []
        self._live_before: int | None = None
        self._state_bytes: int | None = None
        announce(f"{session.name} is planned part by part, not as a whole: {reason}")

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one forward, its parts as planned."""
        self._leaves, spec = flatten(args, kwargs)
        signature = input_signature(self._leaves, spec)
        self.steps.begin(signature, self.stand_ins.absent())
        self._leaves = []
        with self.stand_ins:
            output = self.session.function(*args, **kwargs)
        if not len(self.steps.kinds):
            raise self._without_parts()
        self.steps.guard.after_forward()
        return output

    def _without_parts(self) -> CaptureError:
        """Say why neither the whole nor any part can be planned."""
        if self.stand_ins.failed is None or not self.stand_ins.failed[0]:
            return self.reason
        name, error = self.stand_ins.failed
        return CaptureError(
            f"{self.reason}. Nor can any of its parts be planned by itself; part {name!r}: {error}",
            module=self.reason.module,
        )

    def report(self) -> Report:
        """Return what the plans promise and what the last complete step held."""
        return self.steps.report()

    def close_step(self) -> StepPeaks | None:
        """End the measured window of the last step now; return what it held."""
        return self.steps.close()

    def _capture(self, call: TracedCall, name: str) -> Captured:
        return capture_step_around_data(call, self.session.options, name, in_parts=True)[0]

    def _constant_bytes(self) -> int:
        """Return what is resident now: parameters, buffers, inputs, gradients, optimizer state."""
        session = self.session
        optimizer = session.options.optimizer
        if optimizer is None:
            self._learn_state()
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        held = resident_tensor_bytes(tensors, self.granularity) + (self._state_bytes or 0)
        held += library_bytes(device_of_modules(session.modules))
        if session.replicas is not None:
            held += session.replicas.bucket_bytes(self.granularity)
        return held + lasting_bytes(optimizer, session.modules, expected=False)

    def _learn_state(self) -> None:
        """Take what a step left behind for the optimizer's state, as nobody told its size."""
        meter = self.steps.guard.meter
        assert meter is not None
        before, self._live_before = self._live_before, meter.live_bytes()
        if before is not None:
            grown = self._live_before - before
            grown -= gradient_bytes(self.session.modules, self.granularity)
            self._state_bytes = max(self._state_bytes or 0, grown)

    def _coming_bytes(self) -> int:
        """Return the optimizer state that does not exist yet."""
        optimizer = self.session.options.optimizer
        if optimizer is None and self._state_bytes is not None:
            return 0
        if optimizer is not None and any(optimizer.state.values()):
            return 0
        modules, device = self.session.modules, torch.device(self.device).type
        return optimizer_state_bytes(optimizer, modules, self.granularity, device, own=True)


def refuse_to_prepare(session: Session, reason: CaptureError) -> NoReturn:
    """Refuse to plan before training what is planned part by part, or cannot be planned at all.

    Raises
    ------
    CaptureError
        The reason why the whole cannot be captured, with what happens instead where it is trained.
    """
    _refuse_without_parts(session, reason)
    raise CaptureError(
        f"{session.name} cannot be planned beforehand: {reason}. Its parts are planned while it "
        "takes its first step: train, then ask for tightfit.report"
    ) from reason


def run_in_parts(
    session: Session, reason: CaptureError, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a call that cannot be planned as a whole part by part, and go on so.

    Raises
    ------
    CompileError
        If it was to be compiled.
    CaptureError
        The reason, if there is no part that can be planned; generators are then as before.
    """
    _refuse_without_parts(session, reason)
    if session.options.compile:
        raise CompileError(
            f"{session.name} allows no single graph to compile: {reason}. Way out: compile=False "
            "plans it part by part"
        ) from reason
    before = GeneratorStates(session.modules)
    buffers = {b: b.clone() for m in session.modules.values() for b in m.buffers()}
    parts = Fallback(session, reason)
    try:
        output = parts(args, kwargs)
    except BaseException:
        before.restore()
        for buffer, value in buffers.items():
            buffer.copy_(value)
        raise
    session.parts, session.guard = parts, parts.steps.guard
    return output


def _refuse_without_parts(session: Session, reason: CaptureError) -> None:
    if isinstance(reason, NothingToTrain) or not has_parts(session.modules, session.root):
        raise reason
