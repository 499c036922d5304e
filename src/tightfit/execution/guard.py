"""Watch the true peak of planned steps and compare it with the plan and the budget.

A step's window runs from one planned forward to the next, so the optimizer step and all that user
code holds in between are inside. It ends with its backward where a model with a budget of its own
trains next. The guard adds up bytes resident the whole step (inspected) and bytes that the
allocator gave out on top (metered).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol, TypeAlias
from weakref import WeakSet

import msgspec

from tightfit.allocator import Meter, hook_unavailable_reason, meter_for
from tightfit.capture.trace.garbage import fewer_collections
from tightfit.errors import BudgetExceeded, TightfitError
from tightfit.living import Living
from tightfit.progress import announce
from tightfit.units import format_bytes

_Phase: TypeAlias = Literal["forward", "between", "backward", "after", "over"]
_ADVICE = (
    "Pass optimizer= so that its state is planned for, put the loss inside (tightfit.step), or "
    "raise the budget or the reserve"
)


class StepPeaks(msgspec.Struct, frozen=True):
    """The peaks of one step, in bytes on top of its start."""

    constant_bytes: int  # resident at the start of the step
    # forward_bytes, between_bytes, backward_bytes, after_bytes: peaks of the forward program, of
    # user code until backward, of the backward program, of everything until the next forward (the
    # optimizer step)
    forward_bytes: int = 0
    # boundary_bytes, entered_bytes, ended_bytes: alive when the forward program had ended, when the
    # backward program began, and when autograd had taken its gradients (0: not known)
    boundary_bytes: int = 0
    entered_bytes: int = 0
    ended_bytes: int = 0
    between_bytes: int = 0
    freed_bytes: int = 0  # saved tensors that were freed between forward and backward
    backward_bytes: int = 0
    after_bytes: int = 0
    # The budgets of other callables whose steps were running at the same time: holders of bytes are
    # unknown, so all of them keep to the sum
    other_budgets_bytes: int = 0
    # Whether any of them ran a forward or a backward meanwhile: peaks may be theirs
    others_ran: bool = False

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
    def has_freed_between(self) -> bool:
        """Whether less was held when the backward began than when the forward ended.

        Memory of user code may meanwhile have taken the place of freed memory, unseen.
        """
        return self.entered_bytes + self.freed_bytes < self.boundary_bytes

    @property
    def outside_bytes(self) -> int:
        """The most user code held between forward and backward, on top of the plan.

        Saved tensors were freed for it: the most that it held came after that.
        """
        return max(0, self.between_bytes + self.freed_bytes - self.boundary_bytes)

    @property
    def left_bytes(self) -> int:
        """The bytes that user code held as the backward began, on top of the plan."""
        return max(0, self.entered_bytes + self.freed_bytes - self.boundary_bytes)


class Opened(Protocol):
    @property
    def is_open(self) -> bool:
        """Whether a backward may still come or is running."""


_GUARDS: Living[Guard] = Living()


class Measuring(Protocol):
    def take_peak(self) -> Any:
        """Note the peak so far."""

    def skip_peak(self) -> None:
        """Leave memory held since the peak was last noted out of the step."""


_MEASURING: Living[Measuring] = Living()


def leave_out_of(measuring: Measuring) -> None:
    """Have work to plan a step left out of the steps that something measures."""
    _MEASURING.add(measuring)


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Leave work to plan a step out of every other step that is measured."""
    measuring = _MEASURING.now()
    for each in measuring:
        each.take_peak()
    try:
        yield
    finally:
        for each in measuring:
            each.skip_peak()


class _Exceeded:
    """Says that a step held more than the budget, as the user asked for it: see `Guard`."""

    def __init__(self, on_exceed: Literal["raise", "warn"], advice: str) -> None:
        self._on_exceed = on_exceed
        self._advice = advice
        self._warned = False

    def report(self, step: StepPeaks, guard: Guard, where: str | None) -> None:
        """Raise, or warn the first time."""
        budget_bytes = guard.budget_bytes
        parts = {
            "in the forward program": step.forward_bytes,
            "between forward and backward (the loss and its saved tensors)": step.between_bytes,
            "in the backward program": step.backward_bytes,
            "after backward (the optimizer step and tensors of user code)": step.after_bytes,
        }
        where = where or max(parts, key=parts.__getitem__)
        message = (
            f"the last step held {format_bytes(step.peak_bytes)} on the {guard.device}, "
            f"{format_bytes(step.peak_bytes - budget_bytes)} more than the budget of "
            f"{format_bytes(budget_bytes)}; the peak was {where} "
            f"({format_bytes(step.constant_bytes)} of it constants). {self._advice}"
        )
        if self._on_exceed == "raise":
            raise BudgetExceeded(message, budget_bytes=budget_bytes, measured_bytes=step.peak_bytes)
        if not self._warned:
            self._warned = True
            warnings.warn(message, stacklevel=3)


class _Unmetered:
    """Memory allocated before there was a meter: its release is not metered either.

    `now_bytes`: returns the bytes of it that are held now.
    """

    def __init__(self, now_bytes: Callable[[], int]) -> None:
        self._now_bytes = now_bytes
        self._start_bytes = 0

    def begin(self) -> None:
        self._start_bytes = self._now_bytes()

    def released_bytes(self) -> int:
        return max(0, self._start_bytes - self._now_bytes())


class Guard:
    """Measures steps; raises or warns when one exceeds the budget.

    `device`: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; None: nothing is measured until `start`.
    `advice`: ways out, for the message of a step that exceeded the budget. `unmetered_bytes`:
    returns the bytes of constants that were allocated before there was a meter. `steps`: the last
    steps whose peaks are all known; steps that were only checked are left out.
    """

    def __init__(
        self,
        device: str | None,
        on_exceed: Literal["raise", "warn"],
        advice: str = _ADVICE,
        unmetered_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self.device: str | None = None
        self._unmetered = _Unmetered(unmetered_bytes)
        self._exceeded = _Exceeded(on_exceed, advice)
        self.budget_bytes = 0
        self.steps: list[StepPeaks] = []
        self.growth_bytes = 0  # how much more was alive at the start of this step than of the last
        self.meter: Meter | None = None
        self._start: int | None = None
        self._open: dict[str, int] | None = None
        self._phase: _Phase = "forward"
        self._shared: object | None = None
        self._runs: Iterable[Opened] = ()
        self._other_budgets: WeakSet[Guard] = WeakSet()
        self._others_ran = False
        self._is_checked_only = False
        self._learns = True  # from the open step
        if device is not None:
            self.start(device)

    def start(self, device: str) -> None:
        """Measure steps from now on."""
        self.device = device
        _GUARDS.add(self)
        leave_out_of(self)
        try:
            self.meter = meter_for(device)
        except TightfitError:
            announce(
                f"peaks are not measured in this process: {hook_unavailable_reason()}. The plan "
                "is still verified byte by byte"
            )

    def before_forward(
        self,
        constant_bytes: Callable[[], int],
        budget_bytes: int,
        shared: object | None = None,
        runs: Iterable[Opened] = (),
        *,
        is_known: bool = False,
    ) -> None:
        """Close the window of the previous step and open a new window.

        Steps of models with budgets of their own that have had their backward are over.

        `constant_bytes`: returns the bytes resident now: parameters, buffers, inputs, gradients,
        optimizer state. Asked once the window before is closed. `budget_bytes`: the limit of the
        step that begins, constants included. `shared`: the budget that it shares with others, if it
        does. `runs`: always tells which of its calls await a backward. `is_known`: whether nothing
        is learned from the step any more: it is only checked, and a peak that the device has for
        all readers is left to the user.
        """
        self._shared, self._runs = shared, runs
        self._is_checked_only = is_known and self.meter is not None and self.meter.shares_peak
        others = self._others()
        for other in others:
            other._end_after_backward()
        if self.meter is not None:
            self.close()
            for other in others:
                other._meet(self)
            self._others_ran = False
            self._disturb(others)
            live = self.meter.live_bytes()
            self.growth_bytes = live - self._start if self._start is not None else 0
            self._start = live
            self._open = {"constant_bytes": constant_bytes()}
            self._unmetered.begin()
            self._learns = not self._is_checked_only
            self._phase = "forward"
            self._reset_peak()
        self.budget_bytes = budget_bytes

    def learn(self) -> None:
        """Learn from the step that has just begun, although it was thought to be known."""
        if self._is_checked_only:
            self._is_checked_only, self._learns = False, True
            self._reset_peak()

    @property
    def is_learning(self) -> bool:
        """Whether every peak of the current step will be known."""
        return not self._is_checked_only

    def change_budget(self, budget_bytes: int) -> None:
        """Judge the open step and those to come by another limit."""
        self.budget_bytes = budget_bytes

    def restart(self) -> None:
        """Restart the open window: its peaks so far belong to no step."""
        if self.meter is not None and self._open is not None:
            self._start = self.meter.live_bytes()
            self._reset_peak()

    def leave_out_freed(self, constant_bytes: int = 0) -> None:
        """Leave out memory that was held at the start of the step and has been freed since.

        That is garbage, and so many bytes of its constants.
        """
        if self.meter is not None and self._open is not None and self._start is not None:
            self.take_peak()  # while it was held
            self._start = min(self._start - constant_bytes, self.meter.live_bytes())
            self._open["constant_bytes"] -= constant_bytes

    def note_freed_saved(self, freed_bytes: int) -> None:
        """Note that saved tensors were freed after the forward and before the backward."""
        if self._open is not None and self._phase == "between":
            self._open["freed_bytes"] = self._open.get("freed_bytes", 0) + freed_bytes

    def after_forward(self) -> None:
        if self.meter is not None and self._open is not None:
            self._turn("forward", "between")
            self._disturb(self._others())
            self._open["boundary_bytes"] = self.live_bytes()

    @property
    def open_step(self) -> StepPeaks | None:
        """The peaks of the open step so far; None: its backward has not begun."""
        if self._open is None or self._is_checked_only or self._phase in ("forward", "between"):
            return None
        return StepPeaks(**self._open)

    def before_backward(self) -> None:
        """Note the bytes that user code held between forward and backward."""
        others = self._others()
        for other in others:
            other._end_after_backward()
        if self.meter is not None and self._open is not None:
            if self._phase == "between":
                self._open["entered_bytes"] = self.live_bytes()
            self._turn("between", "backward")
            self._disturb(others)

    def after_backward(self) -> None:
        if self.meter is not None and self._open is not None:
            self._turn("backward", "after")
            self._disturb(self._others())

    def note_ended(self) -> None:
        """Note the bytes held now that autograd has taken the last gradients of the step."""
        if self.meter is not None and self._open is not None and self._phase == "after":
            self._open["ended_bytes"] = self.live_bytes()

    def live_bytes(self) -> int:
        """Return the bytes held now on top of the start of the open step."""
        return self.meter.live_bytes() - (self._start or 0) if self.meter is not None else 0

    def take_peak(self) -> int:
        """Return the peak since the last note, on top of the step's start, and note it."""
        return self._turn(self._phase, self._phase)

    def held_bytes(self) -> int:
        """Return the bytes held now: the constants of the open step and those on top."""
        if self.meter is None or self._open is None:
            return 0
        return self._open["constant_bytes"] + self.live_bytes()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave work to plan a forward out of it, and the garbage of that work."""
        self.take_peak()
        try:
            with fewer_collections():
                yield
        finally:
            self.skip_peak()

    def skip_peak(self) -> None:
        """Leave memory held since the peak was last noted out of the open step."""
        self._reset_peak()

    def close(self, where: str | None = None) -> StepPeaks | None:
        """End the window of the open step; return its peaks, lower bounds if it was only checked.

        `where`: where its peak was, if the caller knows better. Raises `BudgetExceeded` if it held
        more than the budget and the user asked to raise.
        """
        if self._open is None or self.meter is None:
            return None
        self._turn("after", "after")
        # weights that user code has replaced: the new are metered, and the old were not
        self._open["after_bytes"] -= self._unmetered.released_bytes()
        other_budgets_bytes = 0
        if self._other_budgets:
            other_budgets_bytes = sum(other.budget_bytes for other in self._other_budgets)
            self._other_budgets.clear()
        others = {"other_budgets_bytes": other_budgets_bytes, "others_ran": self._others_ran}
        step, self._open = StepPeaks(**self._open, **others), None
        if self._learns:
            self.steps.append(step)
            del self.steps[:-8]
        if step.peak_bytes > self.budget_bytes + other_budgets_bytes:
            self._exceeded.report(step, self, where)
        return step

    def abandon(self) -> None:
        """Forget the open window: the step failed or was dropped."""
        self._open = None

    def _others(self) -> list[Guard]:
        """Return the guards of callables with budgets of their own."""
        if self.device is None or _GUARDS.are_only(self):
            return []
        return [
            other
            for other in _GUARDS.now()
            if other is not self and (self._shared is None or other._shared is not self._shared)
        ]

    def _meet(self, other: Guard) -> None:
        """Note that a step begins while another is running, if it is."""
        if self._open is not None and any(run.is_open for run in self._runs):
            self._other_budgets.add(other)
            other._other_budgets.add(self)

    def _disturb(self, others: Sequence[Guard]) -> None:
        """Let others know that this step begins or ends a program before their backward is over."""
        for other in others:
            other._others_ran |= other._phase not in ("after", "over")

    def _end_after_backward(self) -> None:
        if self._phase == "after":
            self._turn("after", "over")

    def _turn(self, ended: _Phase, begun: _Phase) -> int:
        """Note the peak of a phase that has ended, and begin another; return that peak."""
        if self.meter is None or self._open is None or self._phase == "over":
            return 0
        peak_bytes = self.meter.take_peak_bytes(quietly=self._is_checked_only)
        peak = peak_bytes - (self._start or 0)
        name = f"{ended}_bytes"
        # below 0 where garbage of the start was collected meanwhile
        self._open[name] = max(self._open.get(name, peak), peak)
        self._phase = begun
        return peak

    def _reset_peak(self) -> None:
        if self.meter is not None:
            self.meter.reset_peak(quietly=self._is_checked_only)
