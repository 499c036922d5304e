"""Memory of user code between a planned forward and its backward: assumed, measured, predicted.

An allocator that refuses a request does not know later requests. More is known of the step and of
others like it. That is the memory of user code between forward and backward, of the backward, and
of the optimizer's step.
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
    with_numbers,
)
from tightfit.torch_private.engine import in_backward


class UserCode:
    """The memory of user code between forward and backward: assumed at first, then measured.

    `assumed_bytes`: as long as it was not seen. `planned_bytes`: bytes that plans leave room for.
    """

    def __init__(self, assumed_bytes: int) -> None:
        self.planned_bytes = assumed_bytes
        self.seen_bytes: int | None = None
        self._looks_again, self._first_grew = True, False

    @property
    def is_known(self) -> bool:
        return self.seen_bytes is not None

    @property
    def may_be_seen(self) -> bool:
        """Whether it is still learned: two steps are looked at."""
        return not self.is_known or self._looks_again

    def saw(self, outside_bytes: int, *, has_grown: bool) -> int:
        """Note bytes it held in the last step; existing plans stay in use.

        `has_grown`: whether more is held after the last step than before it, as after the first
        step, which makes an optimizer's state. A second step shows the bytes without that. Returns
        the bytes to plan for.
        """
        before = self.seen_bytes
        if before is not None:
            self._looks_again = False
            outside_bytes = outside_bytes if self._first_grew else max(before, outside_bytes)
        self._first_grew = has_grown
        self.seen_bytes = outside_bytes
        return outside_bytes

    def plan_for(self, outside_bytes: int) -> None:
        """Make the next plan for the bytes it was seen to hold."""
        self.planned_bytes = outside_bytes


class Unmet(msgspec.Struct, frozen=True):
    """What a step is expected to need, where the plan by which it runs has less room."""

    outside_bytes: int  # memory of user code between forward and backward
    needed_bytes: int  # the least budget that was found with room for it


class PlannedForward(msgspec.Struct, frozen=True):
    """A forward that has run by a plan."""

    captured: Captured  # the step
    user_code: UserCode  # memory of code that follows it
    graph: Graph  # the planned graph, with memory resident around the step
    plan: Plan | None  # the plan; None: it was compiled
    unmet: Unmet | None = None  # None: it has all the room that it is expected to need


_UNSEEN = 5  # of what does not last, this part may be taken by code that was not seen to its end


class _Moment(enum.Enum):
    """When a request is refused."""

    BEFORE_FIRST_CALL = enum.auto()  # of all callables within the same limit
    OPEN_CALL = enum.auto()  # a call of any callable runs or awaits its backward
    BETWEEN_CALLS = enum.auto()


class OpenCall:
    """The call whose backward is to come, or that runs.

    `account`: memory of its callee. `origin`: of requests between its forward and its backward.
    `unused`: of requests before the first call. `needs`: searches the least budget for steps like
    this, as far as it is known.
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
        _STEPS.add(self)

    def forward_ended(self, call: PlannedForward) -> None:
        """Note the bytes held at the end of a planned forward."""
        self._call, self._entered_bytes, self._is_differentiated = call, None, False
        self.has_run = True
        self._left_bytes = self._held_bytes()

    def backward_begins(self) -> None:
        """Note the bytes held at the begin of its backward."""
        self._entered_bytes = self._held_bytes()

    def note_differentiated(self) -> None:
        """Note that its backward is differentiated: derived calls are still to come."""
        self._is_differentiated = True

    def is_over(self) -> None:
        """Forget the call: no backward of it is to come."""
        self._call = None
        self._forget_details()

    @property
    def keeper(self) -> Account | None:
        """The account through which it keeps to its limit."""
        return self._account.keeper

    @property
    def is_none(self) -> bool:
        """Whether no call runs or awaits its backward."""
        return self._call is None

    def name_budget(self, moment: _Moment, lacking_bytes: int, *, searches: bool) -> None:
        """Have a refused request name the bytes that the step needs, as far as known.

        `lacking_bytes`: by which the request exceeds the limit.
        """
        keeper, call = self._account.keeper, self._call
        if keeper is None or keeper.tally is None:
            return
        if call is None:
            self._forget_details()
            if moment is not _Moment.OPEN_CALL and keeper.rests:
                coming_bytes = keeper.expected_within_limit_bytes()
                coming_bytes += keeper.growing_within_limit_bytes()
                is_unused = moment is _Moment.BEFORE_FIRST_CALL
                origin = self._unused if is_unused else BETWEEN_CALLS
                needed_bytes = self._account.between.needed_bytes
                named_bytes = with_numbers(needed_bytes + coming_bytes) if needed_bytes else 0
                self._describe(keeper.tally, RefusalDetails(named_bytes, coming_bytes, origin))
            return
        origin = UNKNOWN
        if self._entered_bytes is None:
            origin = self._origin
            needed = self._between_bytes(call)
        else:
            rise = _kept_bytes if self._is_differentiated else _rise_bytes
            needed = max(self._entered_bytes + rise(call), _first_bytes(call))
        named_bytes = with_numbers(max(needed, self._in_step_bytes(call, keeper)))
        if searches:
            named_bytes = max(named_bytes, self.first_steps_bytes())
        growing_bytes = keeper.growing_within_limit_bytes()
        coming_bytes = keeper.coming_state_within_limit_bytes() + growing_bytes
        repeated_bytes = self._once_more_bytes(call, keeper, lacking_bytes, coming_bytes)
        named_bytes = max(named_bytes + growing_bytes, repeated_bytes)
        self._describe(keeper.tally, RefusalDetails(named_bytes, growing_bytes, origin))

    def first_steps_bytes(self) -> int:
        """Search the least budget for steps like the call, if no step was taken yet; else 0.

        Later steps need what was seen. What a loss reads of several outputs is not known.
        """
        call, needs = self._call, self._needs()
        if call is None or needs is None or self._account.since.has_stepped:
            return 0
        if call.user_code.seen_bytes is not None or not _has_one_output(call):
            return 0
        return needs()

    def enough_bytes(self, freed_bytes: int) -> int:
        """Return a budget with which no saved tensors need be freed before the backward.

        `freed_bytes`: the saved tensors that were. 0: steps like it tell more, as the loss can only
        read one output.
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

    def _once_more_bytes(
        self, call: PlannedForward, keeper: Account, lacking_bytes: int, coming_bytes: int
    ) -> int:
        """Return a budget for the refused request in a later step, and for code after it.

        Nothing more can be freed for the request; in a later step the optimizer's state exists,
        too. Code after it takes as much as in an earlier step. Where no step was seen to its end,
        or none that took as much, it may take a part of what does not last, as several loops have
        shown.
        """
        limit_bytes = keeper.limit_bytes
        if limit_bytes is None:
            return 0
        now_bytes = limit_bytes + lacking_bytes
        later_bytes = now_bytes + coming_bytes
        seen_bytes = self._account.between.later_peak_bytes
        if seen_bytes >= later_bytes:
            return seen_bytes
        if not (seen_bytes or call.user_code.may_be_seen):
            return later_bytes
        return later_bytes + max(0, now_bytes - keeper.lasting_within_limit_bytes()) // _UNSEEN

    def _describe(self, tally: Tally, details: RefusalDetails) -> None:
        self._described = tally
        tally.describe_refusals(details)

    def _forget_details(self) -> None:
        if self._described is not None:
            self._described.describe_refusals(RefusalDetails())
            self._described = None

    def _held_bytes(self) -> int:
        keeper = self._account.keeper
        return keeper.held_bytes() if keeper is not None else 0

    def _in_step_bytes(self, call: PlannedForward, keeper: Account) -> int:
        """Return bytes to be held in the optimizer's step: what the call has saved is gone."""
        saved_bytes = 0
        if call.plan is not None:
            crossing_bytes = simulate(call.graph, call.plan).crossing_bytes
            saved_bytes = crossing_bytes - call.graph.constant_bytes
        held_bytes = self._left_bytes if self._entered_bytes is None else self._entered_bytes
        staying_bytes = max(0, held_bytes - saved_bytes)
        return staying_bytes + keeper.later_steps_bytes() - keeper.held_bytes()


def _outside_bytes(call: PlannedForward, used_bytes: int) -> int:
    """Return bytes of user code between forward and backward."""
    if call.user_code.seen_bytes is not None:
        return max(call.user_code.seen_bytes, used_bytes)
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
    """Return how far a planned backward rises above bytes held at its begin."""
    if call.plan is None:
        return 0
    simulation = simulate(call.graph, call.plan)
    crossing = simulation.crossing_index
    begin = simulation.after_bytes[crossing]
    return max(simulation.during_bytes[crossing + 1 :], default=begin) - begin


def _has_one_output(call: PlannedForward) -> bool:
    """Whether a loss outside can only read one output."""
    return len(held_by_losses(call.captured)) == 1


def _first_bytes(call: PlannedForward) -> int:
    """Return bytes of the first step, if user code holds until its end what it is expected to.

    0: it is searched what such a step needs, or known.
    """
    if call.plan is None or call.user_code.is_known or _has_one_output(call):
        return 0
    return simulate(call.graph, call.plan).peak_bytes + expected_outside_bytes(call.captured)


def _kept_bytes(call: PlannedForward) -> int:
    """Return bytes of plain PyTorch in a call that is differentiated, and in code after it.

    All that the call makes is kept, and the backward of the derivative makes about as much again.
    """
    graph = call.captured.graph
    made = producers(graph)
    return 2 * sum(v.size_bytes for v in graph.values if v.id in made)


_STEPS: Living[OpenCall] = Living()


def _name_budgets(lacking_bytes: int, is_optional: bool) -> None:
    steps = list(_STEPS)
    is_open = not all(step.is_none for step in steps)
    used = {id(step.keeper) for step in steps if step.has_run}
    for step in sorted(steps, key=lambda step: not step.is_none):  # open calls say it last
        moment = _Moment.BETWEEN_CALLS if id(step.keeper) in used else _Moment.BEFORE_FIRST_CALL
        moment = _Moment.OPEN_CALL if is_open else moment
        step.name_budget(moment, lacking_bytes, searches=not is_optional)


describe_before_refusals(_name_budgets)
