"""The way out for a model that allows no single graph: its parts are found as they run.

The outermost forward runs as plain Python, and so does that of every inner module that cannot be
captured. The modules inside them are captured and planned each by itself.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from tightfit.capture.calls.signature import input_signature
from tightfit.capture.calls.structure import Arguments
from tightfit.capture.captured import Captured
from tightfit.capture.side_effects.generators import GeneratorStates
from tightfit.capture.traced_call import TracedCall
from tightfit.errors import BadInput, CaptureError, CompileError, without_frames
from tightfit.execution.guard import Guard, StepPeaks
from tightfit.execution.lower import write_back
from tightfit.execution.runtime import Run
from tightfit.progress import announce
from tightfit.session.callee import Callee
from tightfit.session.memory.account import Account
from tightfit.session.options import Options
from tightfit.session.parts.stand_ins import StandIns
from tightfit.session.parts.steps import PartSteps
from tightfit.session.report import Report
from tightfit.session.stages import capture_step_around_data

__all__ = ["InParts", "first_call"]


class InParts:
    """Runs a callee, whatever parts of it can be planned by their plans.

    Parameters
    ----------
    callee, options, account : Callee, Options, Account
        What is run, what the user asked for, and what is held between steps.
    reason : CaptureError
        Why it cannot be captured as a whole; raised again if no part can be either.
    """

    is_used = True

    def __init__(
        self, callee: Callee, options: Options, account: Account, reason: CaptureError
    ) -> None:
        without_frames(reason)
        self.callee = callee
        self.options = options
        self.reason = reason
        self._account = account
        self._resident = _Resident(account)
        gc.collect()  # what is freed during a step would look like room
        self.steps = PartSteps(
            callee.name,
            options,
            str(account.device),
            self._resident,
            self._capture,
            wanted=f"make {callee.name} a model that can be planned as a whole: {reason}",
        )
        if self.steps.guard.meter is None:
            raise reason
        self.stand_ins = StandIns(callee.modules, self.steps, outermost=callee.root is None)
        announce(f"{callee.name} is planned part by part, not as a whole: {reason}")

    @property
    def guard(self) -> Guard:
        """Measures the steps."""
        return self.steps.guard

    @property
    def waiting(self) -> list[Run]:
        """No call has to wait for another's backward: a step may be several calls."""
        return []

    def __call__(self, given: Arguments) -> Any:
        """Run one forward, its parts as planned."""
        self._resident.receive(given.leaves)
        self.steps.begin(input_signature(given.leaves, given.spec), self.stand_ins.absent())
        self._resident.receive(())
        with self.stand_ins:
            output = self.callee.function(*given.args, **given.kwargs)
        if not len(self.steps.known):
            raise self._without_parts()
        self.guard.after_forward()
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

    def _capture(self, call: TracedCall, name: str) -> Captured:
        room_bytes = self.options.usable_bytes - self._account.held_bytes()
        return capture_step_around_data(
            call, self.options, name, in_parts=True, room_bytes=max(0, room_bytes)
        )[0]

    def prepare(self, given: Arguments) -> None:
        """Do nothing: parts are planned while the model takes its first step."""

    def settle(self) -> None:
        """End the step under way, so that the report is of it."""
        self.close_step()

    def report(self) -> Report:
        """Return what the plans promise and what the last complete step held."""
        return self.steps.report()

    def close_step(self) -> StepPeaks | None:
        """End the measured window of the last step now; return what it held."""
        return self.steps.close_step()

    def change_options(self, options: Options) -> None:
        """Plan the next step with other options; what was captured stays."""
        self.options = options
        self.steps.change_options(options)


def first_call(
    callee: Callee, options: Options, account: Account, reason: CaptureError, given: Arguments
) -> tuple[InParts, Any]:
    """Run a call part by part for the first time; return what runs the further ones, and outputs.

    Raises
    ------
    CompileError, BadInput
        If it was to be compiled, or to share a budget.
    CaptureError
        If there is no part that can be planned; generators and buffers are then as before.
    """
    if options.compile:
        raise CompileError(
            f"{callee.name} allows no single graph to compile: {reason}. Way out: compile=False "
            "plans it part by part"
        ) from reason
    if options.shared is not None:
        raise BadInput(
            f"{callee.name} can only be planned part by part, which takes a budget of its "
            f"own, not a shared one: {reason}"
        )
    before = GeneratorStates(callee.modules)
    buffers = {b: b.clone() for m in callee.modules.values() for b in m.buffers()}
    parts = InParts(callee, options, account, reason)
    try:
        return parts, parts(given)
    except BaseException:
        before.restore()
        for buffer, value in buffers.items():
            write_back(buffer, value)  # which may have taken another shape
        raise


class _Resident:
    """What a model holds between its steps, by its account and the inputs of the call."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._leaves: Sequence[Any] = ()

    def receive(self, leaves: Sequence[Any]) -> None:
        """Count these inputs from now on."""
        self._leaves = leaves

    def resident_bytes(self) -> int:
        """Return parameters, buffers, inputs, gradients, optimizer state as they are now."""
        return self._account.resident_bytes(self._leaves)

    def coming_bytes(self) -> int:
        """Return the optimizer's state that does not exist yet."""
        return self._account.coming_state_bytes()

    def rest(self) -> None:
        """End the step: its budget is for whatever comes now."""
        self._account.rest()
