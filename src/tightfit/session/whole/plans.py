"""Chooses the plan of a call of a whole step, for memory resident around it now."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tightfit.allocator.tally import free_for
from tightfit.errors import InfeasibleBudget
from tightfit.execution.guard import StepPeaks
from tightfit.plan.plan import Plan
from tightfit.planners.questions.infeasible import NoPlan
from tightfit.planners.questions.minimum import MinimumBudget
from tightfit.planners.registry import DEFAULT
from tightfit.progress import announce
from tightfit.session.callee import Callee
from tightfit.session.default_addresses import DefaultAddresses
from tightfit.session.memory.account import Account
from tightfit.session.memory.limit import refuses
from tightfit.session.memory.standing import Standing
from tightfit.session.memory.surroundings import Surroundings
from tightfit.session.options import Options
from tightfit.session.whole.advice import advised, needed_by_steps, needed_once_more
from tightfit.session.whole.call_shares import CallShares
from tightfit.session.whole.captures import Captures
from tightfit.session.whole.comparing import Comparing
from tightfit.session.whole.learning import StepMonitor
from tightfit.session.whole.optimistic import (
    FitsPlainly,
    LessExpected,
    around_step,
    lacking_bytes_of,
    less_expected,
    most_bytes,
    without,
    without_expected,
)
from tightfit.session.whole.planning import (
    NeedsComparing,
    PlanRequest,
    improved,
    planned_as,
    planned_at_once,
    planned_for,
    planned_meanwhile,
    smallest_budget,
)
from tightfit.session.whole.specialisation import Planned, Specialisation


class _NoneAtOnce(Exception):
    """Room is left, or taken, for what may come, and no plan for that is found at once."""


def _none_at_once() -> None:
    """Raise `_NoneAtOnce`: no step waits for a plan where another way is known."""
    raise _NoneAtOnce


class _HasRoom(Exception):
    """Memory was freed: a plan may fit now."""


@dataclass(frozen=True)
class _LastChoice:
    """The plan of a call that was alone; the next call like it need not look for its plan."""

    spec: Specialisation  # the step
    around: Surroundings  # memory that was resident around it
    cleared_bytes: int  # of that, bytes that were expected to be freed before its backward
    planned: Planned  # its plan
    plans: int  # how many there were

    def holds(self, spec: Specialisation, around: Surroundings, cleared_bytes: int) -> bool:
        """Whether the same would be found for a call: no better plan is being searched."""
        if spec is not self.spec or (around, cleared_bytes) != (self.around, self.cleared_bytes):
            return False
        return spec.keeps_to(self.planned, self.plans)


class Plans:
    """The plans that calls of a callee run: each call chooses among all that are known.

    `addresses`: of its steps in memory. `shares`: divides the budget among calls that await
    their backward at once. `more_bytes`: held now, or reserved for others, beyond bytes held when
    the last plan was made.
    """

    def __init__(
        self,
        callee: Callee,
        captures: Captures,
        account: Account,
        addresses: DefaultAddresses,
        monitor: StepMonitor,
    ) -> None:
        self.shares = CallShares(callee.name, account)
        self.more_bytes = 0
        self._name = callee.name
        self._captures = captures
        self._account = account
        self._monitor = monitor
        self._comparing = Comparing(account, addresses)
        self._settled: _LastChoice | None = None  # of the last call
        self._leaves_less: weakref.WeakSet[Specialisation] = weakref.WeakSet()  # it was announced
        # Surroundings of steps for which no plan was found, gradients left out that are cleared
        self._never_cleared: weakref.WeakKeyDictionary[Specialisation, set[Surroundings]]
        self._never_cleared = weakref.WeakKeyDictionary()
        self._last: tuple[weakref.ref[Specialisation], Surroundings] | None = None

    def chosen(
        self,
        spec: Specialisation,
        inputs: list[Any],
        options: Options,
        waiting: Sequence[object],
        *,
        waits: bool = False,
    ) -> Planned:
        """Return the plan of a call; where nothing fits, look again after garbage collection.

        `waiting`: earlier calls that await their backward. `waits`: whether to search now and not
        in the background, before training. Raises `InfeasibleBudget` if no plan fits, or
        `FitsPlainly`.
        """
        choose = partial(self._chosen, spec, inputs, options, waiting, waits=waits)
        planned = self._with_room(choose)
        self.shares.runs_by(spec, planned.graph, planned.outcome.plan)
        return planned

    def chosen_once_more(
        self, spec: Specialisation, inputs: list[Any], options: Options
    ) -> Planned:
        """Return the plan of a call that is run once more, in its backward.

        Raises `InfeasibleBudget` if no plan fits.
        """
        self._settled = None
        return self._with_room(partial(self._for_now, spec, inputs, options))

    def _for_now(self, spec: Specialisation, inputs: list[Any], options: Options) -> Planned:
        """Return a plan for memory held now: the backward of the call follows at once.

        Raises `_HasRoom` if none fits, and memory was freed.
        """
        standing = self._standing(spec, inputs, options)
        around = around_step(spec, inputs, self._account, options)
        around = without_expected(around, standing)
        around = replace(around, outside_bytes=0, budget_bytes=options.planned_bytes)
        request = PlanRequest(inputs, options, self._name, self._captures.other_plans)
        try:
            return planned_for(spec, around, request)
        except NeedsComparing:
            self._comparing.end(spec, options)
            return planned_for(spec, around, request)
        except InfeasibleBudget as error:
            if self._frees(lacking_bytes_of(error)):
                raise _HasRoom from None
            raise

    def _with_room(self, choose: Callable[[], Planned]) -> Planned:
        """Return a chosen plan; where none fits, choose again once memory was freed."""
        is_collected = False
        while True:
            try:
                return choose()
            except _HasRoom:
                pass
            except (InfeasibleBudget, FitsPlainly):
                if is_collected or not self._account.collect_garbage():
                    raise
                is_collected = True

    def smallest_budget(
        self, spec: Specialisation, inputs: list[Any], options: Options
    ) -> MinimumBudget:
        """Find the smallest budget with a plan for a step; the plan is kept in mind."""
        self._comparing.end(spec, options)
        alone = around_step(spec, inputs, self._account, options)
        return smallest_budget(spec, replace(alone, earlier_inputs=()), options)

    def needed_bytes(self, freed_in: StepPeaks | None = None, least_bytes: int = 0) -> int:
        """Return the least budget for steps like the last; `least_bytes` if none is known.

        `freed_in`: a step in which saved tensors were freed, and `least_bytes` makes them again.
        """
        if self._last is None or self.shares.has_company:
            return least_bytes
        spec, around = self._last[0](), self._last[1]
        if spec is None:
            return least_bytes
        if freed_in is not None:
            return needed_once_more(spec, around, self._account, freed_in, least_bytes)
        return needed_by_steps(spec, around, self._account, self._monitor.open_step)

    def measuring_room_bytes(self, options: Options) -> int:
        """Return the bytes that measuring operators may hold now."""
        return self._comparing.room_bytes(options)

    def _chosen(
        self,
        spec: Specialisation,
        inputs: list[Any],
        options: Options,
        waiting: Sequence[object],
        *,
        waits: bool,
    ) -> Planned:
        self._comparing.go_on(spec, options, waiting)
        spec.use_step_costs(options)
        alone = partial(around_step, spec, inputs, self._account, options)
        around = alone()
        since = self._account.since
        since.forward_begins(around.gradient_bytes, self._account.gradient_versions)
        cleared_bytes = since.cleared_bytes
        settled, self._settled = self._settled, None
        may_stay = settled is not None and not (waits or options.compile)
        may_stay = may_stay and settled.holds(spec, around, cleared_bytes)
        if may_stay and self.shares.is_alone(spec, options):
            self._settled = settled
            return settled.planned
        looks = not (waits or spec.plans or self.shares.is_new(spec, options))
        self.shares.begin(spec, alone, options, looks=looks)
        known = tuple(spec.plans.values())
        if options.compile:
            self._account.lift_limit()  # memory of compiled plans is measured when they run
        try:
            planned = self._fitting(spec, inputs, options, waits=waits)
        except NeedsComparing:
            self._comparing.end(spec, options)
            self.shares.forget_needs(spec)
            self.shares.begin(spec, alone, options, looks=looks)
            planned = self._fitting(spec, inputs, options, waits=waits)
        if all(planned is not each for each in known):
            self._monitor.leave_out_freed()  # making a plan makes Python collect garbage
            if options.compile:
                self._monitor.restart()  # memory of compiling and trials belongs to no step
        if self.shares.is_alone(spec, options):
            plans = len(spec.plans)
            self._settled = _LastChoice(spec, alone(), cleared_bytes, planned, plans)
        return planned

    def _fitting(
        self, spec: Specialisation, inputs: list[Any], options: Options, *, waits: bool
    ) -> Planned:
        """Return the plan of a step; a call that may come has room only if a plan has it."""
        around = around_step(spec, inputs, self._account, options)
        share = self.shares.share(spec, around, options)
        around = around.with_share(share)
        self._last = weakref.ref(spec), around
        request = PlanRequest(inputs, options, self._name, self._captures.other_plans, waits)
        clearing = self._clearing(spec, around, request)
        if clearing is not None:
            return clearing
        optimistic = self._optimistic(spec, around, request)
        if optimistic is not None:
            self.more_bytes = 0
            return optimistic
        try:
            is_new = self.shares.is_new(spec, options)
            likely = partial(self._likely, spec, around, request)
            first = replace(request, least=is_new, once=self.shares.looks, instead=likely)
            planned = planned_for(spec, around, first)
        except (_NoneAtOnce, InfeasibleBudget) as error:
            if self.shares.looks:
                self.shares.stop_expecting_call()
                return self._fitting(spec, inputs, options, waits=waits)
            assert isinstance(error, InfeasibleBudget)
            return self._with_less_expected(spec, around, request, error)
        self.more_bytes = spec.held_more(planned, around) + share.reserved_bytes
        return planned

    def _clearing(
        self, spec: Specialisation, around: Surroundings, request: PlanRequest
    ) -> Planned | None:
        """Return a plan that counts on gradients to be cleared before its backward, as was seen.

        None: no such plan fits, or the limit does not hold by itself if they are not.
        """
        options, cleared_bytes = request.options, self._account.since.cleared_bytes
        if not cleared_bytes or request.waits or options.compile or self.shares.looks:
            return None
        if self.shares.has_company or not self._is_limited(options):
            return None
        without_them = without(around, others_bytes=0, gradient_bytes=cleared_bytes)
        # code between may hold as much on top of them before they are cleared
        outside_bytes = around.outside_bytes + cleared_bytes
        own = without_them.around.with_outside(outside_bytes)
        without_them = replace(without_them, around=own)
        refused = self._never_cleared.setdefault(spec, set())
        if own in refused:
            return None
        try:
            planned = planned_for(spec, own, replace(request, instead=_none_at_once))
        except (_NoneAtOnce, InfeasibleBudget):
            refused.add(own)
            return None
        if not without_them.fits_with(planned, options.planned_bytes):
            return None
        self.more_bytes = spec.held_more(planned, own)
        return planned

    def _optimistic(
        self, spec: Specialisation, around: Surroundings, request: PlanRequest
    ) -> Planned | None:
        """Return a plan that leaves less room than may be needed, where no search found another."""
        was_refused = spec.was_refused(around)
        if not (spec.was_optimistic or was_refused):
            return None
        if spec.fitting(spec.seen_around(around)) is not None:
            return None
        standing = self._standing(spec, request.inputs, request.options)
        own = without_expected(around, standing)
        known = spec.optimistic(own)
        if known is not None:
            return self._improved(spec, around, known, request)
        if not was_refused:
            return None
        less = less_expected(spec, around, self._account, standing, request.options)
        planned = self._leaving_less(spec, less, request)
        return None if planned is None else spec.take_optimistic(own, planned)

    def _improved(
        self, spec: Specialisation, around: Surroundings, known: Planned, request: PlanRequest
    ) -> Planned:
        """Return a plan that leaves less room than may be needed, or a better plan found since."""
        better = improved(spec, known, request)
        if better is known:
            return known
        standing = self._standing(spec, request.inputs, request.options)
        less = less_expected(spec, around, self._account, standing, request.options)
        if not less.likely_to_come().fits_with(better, request.options.planned_bytes):
            return known
        return spec.take_optimistic(without_expected(around, standing), better)

    def _likely(
        self, spec: Specialisation, around: Surroundings, request: PlanRequest
    ) -> Planned | None:
        """Return a plan found at once with room for what the loop is likely to hold; None: none.

        The alternative is to wait for the search of a plan that has room for all that may come.
        Raises `_NoneAtOnce` where room is left only to see whether another call comes.
        """
        if self.shares.looks:
            raise _NoneAtOnce
        options = request.options
        if request.waits or options.planner != DEFAULT:
            return None
        if self.shares.has_company or not self._is_limited(options):
            return None
        standing = self._standing(spec, request.inputs, options)
        less = less_expected(spec, around, self._account, standing, options)
        coming = less.likely_to_come()
        if coming.around.room_bytes <= around.room_bytes:
            return None
        planned = planned_at_once(spec, coming.around, options, coming.passing_bytes)
        if planned is None:
            least = coming.least(spec)
            if least.needed_bytes > options.planned_bytes:
                return None
            planned = planned_meanwhile(spec, coming.around, least.plan, options)
        if planned is None:
            return None
        if spec not in self._leaves_less:
            self._leaves_less.add(spec)
            announce(
                f"{self._name}: it runs by a plan without room for all of {less.in_words()}: "
                "loops like this free some of that in time. Requests beyond the budget are refused"
            )
        return spec.take_optimistic(without_expected(around, standing), planned)

    def _with_less_expected(
        self,
        spec: Specialisation,
        around: Surroundings,
        request: PlanRequest,
        error: InfeasibleBudget,
    ) -> Planned:
        """Return a plan without room for all that is expected, where the limit holds by itself.

        Raises `InfeasibleBudget` if that does not fit either, or `FitsPlainly`.
        """
        account, options = self._account, request.options
        lacking_bytes = lacking_bytes_of(error)
        if isinstance(error, NoPlan):
            spec.least_budgets.learn(error.least)
        standing = self._standing(spec, request.inputs, options)
        less = less_expected(spec, around, account, standing, options)
        less = replace(less, may_be_alone=self._may_be_alone(spec, options))
        planned = self._leaving_less(spec, less, request)
        if planned is None:
            if not self._has_room_plainly(spec, less, options) and self._frees(lacking_bytes):
                raise _HasRoom
            open_calls = self.shares.open_calls(spec, around, options)
            try:
                expected = less if self._is_limited(options) else less.all_at_once()
                advice = advised(error, spec, expected, account, options, open_calls)
                if (advice.minimum_bytes or 0) <= options.planned_bytes:
                    # advice is searched for longer, and what it found is known now
                    planned = self._leaving_less(spec, less, request)
                    planned = planned or self._as_advised(spec, less, options)
                if planned is None:
                    self._monitor.abandon()
                    raise self._fits_plainly(spec, less, options, advice) or advice from None
            finally:
                del error  # else its traceback holds it, this frame and the inputs
        if not spec.was_optimistic:
            announce(
                f"{self._name}: no plan has room for {less.in_words()}. It runs by a plan without "
                "that room; requests beyond the budget are refused"
            )
        self.more_bytes = 0
        spec.note_refused(around, lacking_bytes)
        return spec.take_optimistic(without_expected(around, standing), planned)

    def _fits_plainly(
        self, spec: Specialisation, less: LessExpected, options: Options, error: InfeasibleBudget
    ) -> FitsPlainly | None:
        """Return the error that says plain PyTorch may have room; None: not even for a forward."""
        if self._has_room_plainly(spec, less, options):
            return FitsPlainly(error, has_backward=True)
        if less.may_be_alone and less.forward_alone_bytes(spec) <= most_bytes(options):
            return FitsPlainly(error, has_backward=False)
        return None

    def _has_room_plainly(self, spec: Specialisation, less: LessExpected, options: Options) -> bool:
        """Whether plain PyTorch is expected to have room for a call and its backward."""
        if options.needs_plans or not self._may_leave_less(spec, less, options):
            return False
        return less.plain_bytes(spec) <= most_bytes(options)

    def _frees(self, lacking_bytes: int) -> bool:
        """Free garbage, else saved tensors of calls that wait; return whether there were any."""
        if self._account.collect_garbage():
            return True
        before_bytes = self._monitor.live_bytes() or 0
        is_freed = free_for(max(1, lacking_bytes), self._account.device) > 0
        self._monitor.leave_out_freed(before_bytes - (self._monitor.live_bytes() or 0))
        return is_freed

    def _may_be_alone(self, spec: Specialisation, options: Options) -> bool:
        """Whether a call may run though there is no room for its backward: none may come.

        Only where another step trains may it be meant to have none.
        """
        if options.needs_plans or not self._is_limited(options):
            return False
        return any(other.plans for other in self._captures if other is not spec)

    def _is_limited(self, options: Options) -> bool:
        """Whether the limit holds by itself, however much a step takes.

        Only then plans may count on it that memory held now is freed before the backward.
        """
        given = options.plan is not None or options.compile or options.arena
        return not given and options.ranks is None and refuses(self._account)

    def _may_leave_less(self, spec: Specialisation, less: LessExpected, options: Options) -> bool:
        """Whether a plan may leave less room than may be needed: the limit holds by itself.

        Where others need room, too: only if saved tensors can be freed for them, or plain PyTorch
        has room.
        """
        if not self._is_limited(options):
            return False
        if not (self.shares.has_company and options.needs_plans):
            return True
        return less.plain_bytes_now(spec) <= most_bytes(options)

    def _leaving_less(
        self, spec: Specialisation, less: LessExpected, request: PlanRequest
    ) -> Planned | None:
        """Return a plan without room for all that is expected; None: none is allowed or fits."""
        options = request.options
        if not self._may_leave_less(spec, less, options):
            return None

        def planned_from(around: Surroundings, known: Plan) -> Planned:
            return planned_for(spec, around, replace(request, others=lambda: (known,)))

        plan_as = partial(planned_as, spec, options=options)
        return less.planned(spec, planned_from, plan_as, options.planned_bytes)

    def _as_advised(
        self, spec: Specialisation, less: LessExpected, options: Options
    ) -> Planned | None:
        """Return the least plan with room for what the loop is likely to hold, if it fits."""
        if not self._may_leave_less(spec, less, options):
            return None
        coming = less.likely_to_come()
        planned = planned_as(spec, coming.around, coming.least(spec).plan, options=options)
        fits = planned is not None and coming.fits_with(planned, options.planned_bytes)
        return planned if fits else None

    def _standing(self, spec: Specialisation, inputs: Sequence[Any], options: Options) -> Standing:
        others = options.others_in_budget(self._account)
        return self._account.standing(inputs, others, spec.input_bytes)
