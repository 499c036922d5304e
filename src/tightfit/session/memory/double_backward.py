"""Steps with a backward that is differentiated: what they take where forwards run by plans."""

from __future__ import annotations

from typing import Any

from tightfit.allocator import Meter, own_meter_for
from tightfit.execution.guard import leave_out_of
from tightfit.session.memory.account import Account
from tightfit.session.memory.limit import refuses
from tightfit.session.memory.optimizers import before_every_step


class NeedsLessEagerly(Exception):
    """A call takes less memory as plain PyTorch than by a plan: see `DoubleBackwardSteps`."""


class DoubleBackwardSteps:
    """Tells which calls take less memory as plain PyTorch than by a plan.

    A plan's forward runs again for a backward that is differentiated (`create_graph`), and all
    gradients of a call come at once. Plain PyTorch runs it once and hands gradients on one by one.
    Where the last such step would not fit with the memory held now, its calls had better run
    plainly. A step begins with the first call after that of an optimizer.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self._signatures: set[Any] = set()  # of calls with such a backward
        self._begin_bytes: int | None = None  # held at the begin of the step
        self._gradient_bytes = 0  # of that, of gradients
        self._exceeds = False  # whether the current step would, by plans
        self._may_measure = True  # whether a meter was not tried for yet
        self._meter: Meter | None = None
        self._is_measured = False
        self._peak_bytes = 0
        self._grown_bytes = 0  # the most that such a step took on top of its begin
        self.needed_bytes = 0  # by the current step by plans, as far as known
        before_every_step(self)

    def runs_eagerly(self, signature: Any) -> bool:
        """Note that a call begins; return whether it had better run as plain PyTorch."""
        if self._begin_bytes is None:
            self._begin_bytes = self._held_bytes()
            self._exceeds = self._grown_bytes > 0 and self._would_exceed(self._begin_bytes)
        return self._exceeds and signature in self._signatures

    def _would_exceed(self, held_bytes: int) -> bool:
        """Whether a step does not fit by plans that begins with so much held."""
        limiter = self._account.limiter
        if limiter is None or limiter.limit_bytes is None or not refuses(self._account):
            return False
        self.needed_bytes = held_bytes - self._account.gradient_bytes() + self._grown_bytes
        return self.needed_bytes > limiter.limit_bytes

    def begins(self, signature: Any) -> None:
        """Note that the backward of a call begins, and is differentiated."""
        self._signatures.add(signature)
        if self._is_measured or self._begin_bytes is None or self._account.limiter is None:
            return
        if self._may_measure:
            self._may_measure, self._meter = False, own_meter_for(self._account.device)
            leave_out_of(self)
        if self._meter is not None:
            self._is_measured, self._peak_bytes = True, 0
            self._gradient_bytes = self._account.gradient_bytes()
            self.skip_peak()

    def before_step(self, optimizer: Any) -> None:
        """Note that an optimizer steps: the step ends."""
        if self._is_measured and self._begin_bytes is not None:
            self.take_peak()
            begun_bytes = self._begin_bytes - self._gradient_bytes
            self._grown_bytes = max(self._grown_bytes, self._peak_bytes - begun_bytes)
        self._begin_bytes, self._is_measured, self._exceeds = None, False, False

    def take_peak(self) -> None:
        """Note the peak so far: work follows that belongs to no step."""
        if self._is_measured and self._meter is not None:
            on_top_bytes = self._meter.take_peak_bytes() - self._meter.live_bytes()
            self._peak_bytes = max(self._peak_bytes, self._held_bytes() + on_top_bytes)

    def skip_peak(self) -> None:
        """Leave memory held since the peak was noted out of the step."""
        if self._meter is not None:
            self._meter.reset_peak()

    def _held_bytes(self) -> int:
        limiter = self._account.limiter
        return limiter.held_bytes() if limiter is not None else 0
