"""Memory of user code between a planned forward and its backward, and budgets for it.

An allocator that refuses a request does not know later requests. From the step and others like it,
more is known: the memory of user code between forward and backward, of the backward, and of the
optimizer's step.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable

import msgspec

from tightfit.allocator.refusal_details import BETWEEN_CALLS, UNKNOWN, Origin, RefusalDetails
from tightfit.allocator.tally import Tally, describe_before_refusals
from tightfit.capture.captured import Captured
from tightfit.graph.ir import Graph
from tightfit.graph.liveness import producers
from tightfit.living import Living
from tightfit.plan.plan import Plan
from tightfit.plan.simulate import simulate
from tightfit.session.memory.account import Account
from tightfit.session.memory.surroundings import (
    assumed_outside_bytes,
    expected_outside_bytes,
    held_by_losses,
    with_slack,
)
from tightfit.torch_private.engine import in_backward


class UserCode:
    """The memory of user code between forward and backward: assumed at first, then measured.

    `planned_bytes`: bytes that plans leave room for.
    """

    def __init__(self, assumed_bytes: int) -> None:
        self.planned_bytes = assumed_bytes
        self.measured_bytes: int | None = None
        self._measures_again, self._first_grew = True, False

    @property
    def is_known(self) -> bool:
        return self.measured_bytes is not None

    @property
    def is_learning(self) -> bool:
        """Whether the next step is measured: two are."""
        return not self.is_known or self._measures_again

    def note_measured(self, outside_bytes: int, *, has_grown: bool) -> int:
        """Note bytes held in the last step; return the bytes to plan for from now on.

        `has_grown`: whether more is held after the step than before it, as the optimizer's state
        after the first. The second step then shows the bytes without that.
        """
        before = self.measured_bytes
        if before is not None:
            self._measures_again = False
            outside_bytes = outside_bytes if self._first_grew else max(before, outside_bytes)
        self._first_grew = has_grown
        self.measured_bytes = outside_bytes
        return outside_bytes

    def plan_for(self, outside_bytes: int) -> None:
        self.planned_bytes = outside_bytes


class Unmet(msgspec.Struct, frozen=True):
    """What a step is expected to need, where its plan has less room."""

    outside_bytes: int  # memory of user code between forward and backward
    needed_bytes: int  # the least budget that was found with room for it


class PlannedForward(msgspec.Struct, frozen=True):
    """A forward that has run by a plan."""

    captured: Captured
    user_code: UserCode
    graph: Graph  # with memory resident around the step
    plan: Plan | None  # None: it was compiled
    unmet: Unmet | None = None  # None: the plan has room for all that is expected


_UNMEASURED = 5  # code that was not measured to its end may take this part of what does not last


class _Moment(enum.Enum):
    """When a request is refused."""

    BEFORE_FIRST_CALL = enum.auto()  # of all callables within the same limit
    OPEN_CALL = enum.auto()  # a call of any callable runs or awaits its backward
    BETWEEN_CALLS = enum.auto()


class OpenCall:
    """The last call of a callee, from its forward to the end of its backward.

    `origin`: of requests between its forward and its backward. `unused`: of requests before the
    first call. `needs`: searches the least budget for steps like it; 0: it is not known.
    """

    def __init__(
        self,
        account: Account,
        origin: Origin,
        unused: Origin,
        needs: weakref.WeakMethod[Callable[[], int]],
    ) -> None:
        self._account = account
        self._needs = needs
        self._origin, self._unused = origin, unused
        self.has_run = False
        self._call: PlannedForward | None = None
        self._left_bytes = 0
        self._entered_bytes: int | None = None
        self._is_differentiated = False
        self._described: Tally | None = None
        _OPEN_CALLS.add(self)

    def forward_ended(self, call: PlannedForward) -> None:
        self._call, self._entered_bytes, self._is_differentiated = call, None, False
        self.has_run = True
        self._left_bytes = self._held_bytes()

    def backward_begins(self) -> None:
        self._entered_bytes = self._held_bytes()

    def note_differentiated(self) -> None:
        """Note that the backward is differentiated: derived calls are to come."""
        self._is_differentiated = True

    def end(self) -> None:
        """End the call: no backward of it is to come."""
        self._call = None
        self._forget_details()

    @property
    def limiter(self) -> Account | None:
        """The account that keeps the limit."""
        return self._account.limiter

    @property
    def is_closed(self) -> bool:
        """Whether no call runs or awaits its backward."""
        return self._call is None

    def name_budget(self, moment: _Moment, lacking_bytes: int, *, searches: bool) -> None:
        """Have the error of a refused request name a budget for the step, as far as known.

        `lacking_bytes`: by which the request exceeds the limit.
        """
        limiter = self._account.limiter
        if limiter is None or limiter.tally is None:
            return
        if self._call is not None:
            details = self._details(self._call, limiter, lacking_bytes, searches=searches)
            self._describe(limiter.tally, details)
            return
        self._forget_details()
        if moment is not _Moment.OPEN_CALL and limiter.rests:
            coming_bytes = limiter.expected_within_limit_bytes()
            coming_bytes += limiter.growing_within_limit_bytes()
            origin = self._unused if moment is _Moment.BEFORE_FIRST_CALL else BETWEEN_CALLS
            needed_bytes = self._account.loop_peaks.needed_bytes
            named_bytes = with_slack(needed_bytes + coming_bytes) if needed_bytes else 0
            self._describe(limiter.tally, RefusalDetails(named_bytes, coming_bytes, origin))

    def _details(
        self, call: PlannedForward, limiter: Account, lacking_bytes: int, *, searches: bool
    ) -> RefusalDetails:
        """Return the details of a request that is refused while a call is open."""
        origin = UNKNOWN
        if self._entered_bytes is None:
            origin = self._origin
            needed = self._between_bytes(call)
        else:
            rise = _kept_bytes if self._is_differentiated else _rise_bytes
            needed = max(self._entered_bytes + rise(call), _first_bytes(call))
        named_bytes = with_slack(max(needed, self._in_step_bytes(call, limiter)))
        if searches:
            named_bytes = max(named_bytes, self._first_steps_bytes())
        growing_bytes = limiter.growing_within_limit_bytes()
        coming_bytes = limiter.coming_state_within_limit_bytes() + growing_bytes
        repeated_bytes = self._repeated_request_bytes(call, limiter, lacking_bytes, coming_bytes)
        named_bytes = max(named_bytes + growing_bytes, repeated_bytes)
        return RefusalDetails(named_bytes, growing_bytes, origin)

    def _first_steps_bytes(self) -> int:
        """Search the least budget for steps like the call, before the first optimizer step; else 0.

        Later steps need what was measured. Which of several outputs a loss reads is not known.
        """
        call, needs = self._call, self._needs()
        if call is None or needs is None or self._account.since.has_stepped:
            return 0
        if call.user_code.measured_bytes is not None or not _has_one_output(call):
            return 0
        return needs()

    def enough_bytes(self, freed_bytes: int) -> int:
        """Return a budget with which no saved tensors have to be freed before the backward.

        0: only one output can be read by a loss, so that a search for steps like it says more.

        `freed_bytes`: the saved tensors that were freed.
        """
        if self._call is None or _has_one_output(self._call):
            return 0
        return self._between_bytes(self._call, freed_bytes)

    def _between_bytes(self, call: PlannedForward, freed_bytes: int = 0) -> int:
        """Return bytes that are needed between the forward of a call and its backward."""
        used_bytes = max(0, self._held_bytes() + freed_bytes - self._left_bytes)
        outside_bytes = _outside_bytes(call, used_bytes)
        needed_bytes = self._left_bytes + outside_bytes
        if call.unmet is not None and outside_bytes <= call.unmet.outside_bytes:
            return min(needed_bytes, call.unmet.needed_bytes)
        return needed_bytes

    def _repeated_request_bytes(
        self, call: PlannedForward, limiter: Account, lacking_bytes: int, coming_bytes: int
    ) -> int:
        """Return a budget for the same request in a later step, and for code after it.

        In a later step the optimizer's state exists, too. Code after the request takes as much as
        in an earlier step. Where no such step was measured to its end, it may take a part of what
        does not last, as several loops have shown.
        """
        limit_bytes = limiter.limit_bytes
        if limit_bytes is None:
            return 0
        now_bytes = limit_bytes + lacking_bytes
        later_bytes = now_bytes + coming_bytes
        earlier_bytes = self._account.loop_peaks.step_peak_bytes
        if earlier_bytes >= later_bytes:
            return earlier_bytes
        if not (earlier_bytes or call.user_code.is_learning):
            return later_bytes
        return later_bytes + max(0, now_bytes - limiter.lasting_within_limit_bytes()) // _UNMEASURED

    def _describe(self, tally: Tally, details: RefusalDetails) -> None:
        self._described = tally
        tally.describe_refusals(details)

    def _forget_details(self) -> None:
        if self._described is not None:
            self._described.describe_refusals(RefusalDetails())
            self._described = None

    def _held_bytes(self) -> int:
        limiter = self._account.limiter
        return limiter.held_bytes() if limiter is not None else 0

    def _in_step_bytes(self, call: PlannedForward, limiter: Account) -> int:
        """Return bytes held in the optimizer's step, after the saved tensors of the call."""
        saved_bytes = 0
        if call.plan is not None:
            crossing_bytes = simulate(call.graph, call.plan).crossing_bytes
            saved_bytes = crossing_bytes - call.graph.constant_bytes
        held_bytes = self._left_bytes if self._entered_bytes is None else self._entered_bytes
        staying_bytes = max(0, held_bytes - saved_bytes)
        return staying_bytes + limiter.later_steps_bytes() - limiter.held_bytes()


def _outside_bytes(call: PlannedForward, used_bytes: int) -> int:
    """Return bytes of user code between forward and backward."""
    if call.user_code.measured_bytes is not None:
        return max(call.user_code.measured_bytes, used_bytes)
    sizes = [size for _, size in held_by_losses(call.captured)]
    gradients_bytes, largest_bytes = sum(sizes), max(sizes, default=0)
    if not in_backward():
        return max(assumed_outside_bytes(call.captured), used_bytes)
    if used_bytes < largest_bytes:  # nothing of that size was kept for the loss's own backward
        return max(gradients_bytes, used_bytes)
    if len(sizes) == 1:
        return max(assumed_outside_bytes(call.captured), used_bytes)
    return max(gradients_bytes, used_bytes) + largest_bytes


def _rise_bytes(call: PlannedForward) -> int:
    """Return the peak of a planned backward above the bytes held at its begin."""
    if call.plan is None:
        return 0
    simulation = simulate(call.graph, call.plan)
    crossing = simulation.crossing_index
    begin = simulation.after_bytes[crossing]
    return max(simulation.during_bytes[crossing + 1 :], default=begin) - begin


def _has_one_output(call: PlannedForward) -> bool:
    """Whether a loss outside can read only one output."""
    return len(held_by_losses(call.captured)) == 1


def _first_bytes(call: PlannedForward) -> int:
    """Return bytes of the first step, if user code holds what is expected until its end.

    0: the need of such a step is measured, or searched.
    """
    if call.plan is None or call.user_code.is_known or _has_one_output(call):
        return 0
    return simulate(call.graph, call.plan).peak_bytes + expected_outside_bytes(call.captured)


def _kept_bytes(call: PlannedForward) -> int:
    """Return bytes of plain PyTorch in a call whose backward is differentiated.

    All values of the call are kept, and the backward of the derivative makes about as many.
    """
    graph = call.captured.graph
    made = producers(graph)
    return 2 * sum(v.size_bytes for v in graph.values if v.id in made)


_OPEN_CALLS: Living[OpenCall] = Living()


def _name_budgets(lacking_bytes: int, is_optional: bool) -> None:
    calls = list(_OPEN_CALLS)
    is_open = not all(call.is_closed for call in calls)
    used = {id(call.limiter) for call in calls if call.has_run}
    for call in sorted(calls, key=lambda call: not call.is_closed):  # the last to describe counts
        moment = _Moment.BETWEEN_CALLS if id(call.limiter) in used else _Moment.BEFORE_FIRST_CALL
        moment = _Moment.OPEN_CALL if is_open else moment
        call.name_budget(moment, lacking_bytes, searches=not is_optional)


describe_before_refusals(_name_budgets)
