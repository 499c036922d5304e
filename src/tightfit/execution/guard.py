"""Watch the true peak of planned steps and compare it with the plan and the budget.

A step's window runs from one planned forward to the next, so the optimizer step and whatever user
code holds in between are inside. The guard adds up what is resident the whole step (inspected)
and what the allocator gave out on top (metered).
"""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from tightfit.allocator import Meter, hook_unavailable_reason, meter_for
from tightfit.errors import BudgetExceeded, TightfitError
from tightfit.units import format_bytes

__all__ = ["Guard", "StepPeaks", "announce"]


def announce(message: str) -> None:
    """Tell the user one line, on standard error."""
    print(f"tightfit: {message}", file=sys.stderr)


@dataclass
class StepPeaks:
    """What one step held, in bytes on top of its start.

    Parameters
    ----------
    constant_bytes : int
        What was resident at the start of the step.
    forward_bytes, between_bytes, backward_bytes, after_bytes : int
        Peaks of the forward program, of user code until backward, of the backward program, of
        everything until the next forward (the optimizer step).
    boundary_bytes : int
        Alive when the forward program had ended.
    """

    constant_bytes: int
    forward_bytes: int = 0
    boundary_bytes: int = 0
    between_bytes: int = 0
    backward_bytes: int = 0
    after_bytes: int = 0

    @property
    def program_bytes(self) -> int:
        """The peak of the planned part, constants included."""
        return self.constant_bytes + max(
            self.forward_bytes, self.between_bytes, self.backward_bytes
        )

    @property
    def peak_bytes(self) -> int:
        """The peak of the whole step, constants included."""
        return max(self.program_bytes, self.constant_bytes + self.after_bytes)

    @property
    def outside_bytes(self) -> int:
        """The most user code held between forward and backward, on top of the plan."""
        return max(0, self.between_bytes - self.boundary_bytes)


@dataclass
class Guard:
    """Measures steps; raises or warns when one exceeds the budget.

    Parameters
    ----------
    budget_bytes : int
        The limit, constants included.
    device : str
        ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
    on_exceed : str
        ``"raise"`` or ``"warn"``.
    constants : callable
        Returns the bytes resident now: parameters, buffers, inputs, gradients, optimizer state.
    growth_bytes : int
        How much more was alive at the start of this step than of the one before.
    """

    budget_bytes: int
    device: str
    on_exceed: Literal["raise", "warn"]
    constants: Callable[[], int]
    steps: list[StepPeaks] = field(default_factory=list)
    meter: Meter | None = None
    growth_bytes: int = 0
    _start: int | None = None
    _open: StepPeaks | None = None
    _warned: bool = False

    def __post_init__(self) -> None:
        try:
            self.meter = meter_for(self.device)
        except TightfitError:
            announce(
                f"peaks are not measured in this process: {hook_unavailable_reason()}. The plan "
                "is still verified byte by byte"
            )

    def before_forward(self) -> None:
        """Close the window of the step before and open a new one."""
        if self.meter is None:
            return
        self.close()
        live = self.meter.live_bytes()
        self.growth_bytes = live - self._start if self._start is not None else 0
        self._start = live
        self._open = StepPeaks(self.constants())
        self.meter.reset_peak()

    def restart(self) -> None:
        """Begin the open window anew: what happened in it so far belongs to no step."""
        if self.meter is not None and self._open is not None:
            self._start = self.meter.live_bytes()
            self.meter.reset_peak()

    def after_forward(self) -> None:
        """Note the peak of the forward program."""
        if self.meter is not None and self._open is not None:
            self._open.forward_bytes = max(self._open.forward_bytes, self._take_peak())
            self._open.boundary_bytes = self.meter.live_bytes() - (self._start or 0)

    def before_backward(self) -> None:
        """Note what user code held between forward and backward."""
        if self.meter is not None and self._open is not None:
            self._open.between_bytes = self._take_peak()

    def after_backward(self) -> None:
        """Note the peak of the backward program."""
        if self.meter is not None and self._open is not None:
            self._open.backward_bytes = max(self._open.backward_bytes, self._take_peak())

    def held_bytes(self) -> int:
        """Return what is held now: the constants of the open step and what came on top."""
        if self.meter is None or self._open is None:
            return 0
        return self._open.constant_bytes + self.meter.live_bytes() - (self._start or 0)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out of a forward what is done to plan it, and the garbage that leaves behind."""
        self.after_forward()
        try:
            yield
        finally:
            gc.collect()
            if self.meter is not None:
                self.meter.reset_peak()

    def close(self) -> StepPeaks | None:
        """End the window of the open step; return what it held.

        Raises
        ------
        BudgetExceeded
            If it held more than the budget and the user asked to raise.
        """
        step, self._open = self._open, None
        if step is None or self.meter is None:
            return None
        step.after_bytes = self._take_peak()
        self.steps.append(step)
        del self.steps[:-8]
        if step.peak_bytes > self.budget_bytes:
            self._exceeded(step)
        return step

    def abandon(self) -> None:
        """Forget the open window: the step failed or was dropped."""
        self._open = None

    def _take_peak(self) -> int:
        assert self.meter is not None
        peak = self.meter.peak_bytes() - (self._start or 0)
        self.meter.reset_peak()
        return peak

    def _exceeded(self, step: StepPeaks) -> None:
        parts = {
            "in the forward program": step.forward_bytes,
            "between forward and backward (the loss and what it keeps)": step.between_bytes,
            "in the backward program": step.backward_bytes,
            "after backward (the optimizer step and what user code keeps)": step.after_bytes,
        }
        where = max(parts, key=parts.__getitem__)
        message = (
            f"the last step held {format_bytes(step.peak_bytes)} on the {self.device}, "
            f"{format_bytes(step.peak_bytes - self.budget_bytes)} more than the budget of "
            f"{format_bytes(self.budget_bytes)}; the peak was {where} "
            f"({format_bytes(step.constant_bytes)} of it constants). Pass optimizer= so that its "
            "state is planned for, put the loss inside (tightfit.step), or raise the budget or "
            "the reserve"
        )
        if self.on_exceed == "raise":
            raise BudgetExceeded(
                message, budget_bytes=self.budget_bytes, measured_bytes=step.peak_bytes
            )
        if not self._warned:
            self._warned = True
            warnings.warn(message, stacklevel=3)
