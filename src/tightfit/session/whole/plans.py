"""Chooses the plan of a call, for memory resident around it now."""

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
from tightfit.session.memory.held_at_call import HeldAtCall
from tightfit.session.memory.limit import refuses
from tightfit.session.memory.surroundings import Surroundings
from tightfit.session.options import Options
from tightfit.session.whole.advice import advised, needed_by_steps, needed_once_more
from tightfit.session.whole.call_shares import CallShares
from tightfit.session.whole.captures import Captures
from tightfit.session.whole.comparing import ComparisonSchedule
from tightfit.session.whole.learning import StepMonitor
from tightfit.session.whole.optimistic import (
    FitsEagerly,
    LessExpected,
    lacking_bytes_of,
    less_expected,
    most_bytes,
    surroundings_of,
    without,
    without_expected,
)
from tightfit.session.whole.planning import (
    NeedsComparisons,
    PlanningRequest,
    improved,
    planned_as,
    planned_at_once,
    planned_for,
    planned_meanwhile,
    smallest_budget,
)
from tightfit.session.whole.specialisation import Planned, Specialisation


class _NoneAtOnce(Exception):
    """No plan is found at once with, or without, room for memory that may come."""


def _none_at_once() -> None:
    """Raise `_NoneAtOnce`: another plan is tried before a step waits for a search."""
    raise _NoneAtOnce


class _MemoryFreed(Exception):
    """Memory was freed: a plan may fit now."""


@dataclass(frozen=True)
class _LastChoice:
    """The plan of a call that was alone, for the next call like it."""

    spec: Specialisation
    surroundings: Surroundings  # memory that was resident around it
    cleared_bytes: int  # of that, gradients that were expected to be cleared before its backward
    planned: Planned
    plans: int  # the number of known plans

    def holds(self, spec: Specialisation, surroundings: Surroundings, cleared_bytes: int) -> bool:
        """Whether the same plan would be chosen for a call."""
        mine = self.spec, self.surroundings, self.cleared_bytes
        is_alike = (spec, surroundings, cleared_bytes) == mine
        return is_alike and spec.has_only(self.planned, self.plans)


class Plans:
    """Chooses and makes the plans of the calls of a callee.

    `shares`: divides the budget among calls that await their backward at once. `more_bytes`: held
    now, or reserved for others, beyond bytes held when the last plan was made.
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
        self._comparisons = ComparisonSchedule(account, addresses)
        self._last_choice: _LastChoice | None = None  # of the last call
        self._leaves_less: weakref.WeakSet[Specialisation] = weakref.WeakSet()  # it was announced
        # Surroundings for which no plan was found, without gradients that are cleared in time
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
        searches: bool = False,
    ) -> Planned:
        """Return the plan of a call.

        `waiting`: earlier calls that await their backward. `searches`: whether to search before
        training, not in the background. Raises `InfeasibleBudget` or `FitsEagerly` if no plan fits.
        """
        request = self._request(inputs, options, searches=searches)
        planned = self._with_room(partial(self._chosen, spec, request, waiting))
        self.shares.note_plan(spec, planned.graph, planned.outcome.plan)
        return planned

    def chosen_once_more(
        self, spec: Specialisation, inputs: list[Any], options: Options
    ) -> Planned:
        """Return the plan of a call that is run once more, in its backward.

        Raises `InfeasibleBudget` if no plan fits.
        """
        self._last_choice = None
        return self._with_room(partial(self._for_now, spec, self._request(inputs, options)))

    def _request(
        self, inputs: list[Any], options: Options, *, searches: bool = False
    ) -> PlanningRequest:
        return PlanningRequest(inputs, options, self._name, self._captures.other_plans, searches)

    def _for_now(self, spec: Specialisation, request: PlanningRequest) -> Planned:
        """Return a plan for memory held now: the backward of the call follows at once.

        Raises `_MemoryFreed` if none fits, and memory was freed.
        """
        options = request.options
        surroundings = self._surroundings(spec, request)
        surroundings = without_expected(surroundings, self._held_at_call(spec, request))
        surroundings = replace(surroundings, outside_bytes=0, budget_bytes=options.planned_bytes)
        try:
            return planned_for(spec, surroundings, request)
        except NeedsComparisons:
            self._comparisons.end(spec, options)
            return planned_for(spec, surroundings, request)
        except InfeasibleBudget as error:
            if self._frees(lacking_bytes_of(error)):
                raise _MemoryFreed from None
            raise

    def _with_room(self, choose: Callable[[], Planned]) -> Planned:
        """Return a chosen plan; where none fits, free memory and choose again."""
        is_collected = False
        while True:
            try:
                return choose()
            except _MemoryFreed:
                pass
            except (InfeasibleBudget, FitsEagerly):
                if is_collected or not self._account.collect_garbage():
                    raise
                is_collected = True

    def smallest_budget(
        self, spec: Specialisation, inputs: list[Any], options: Options
    ) -> MinimumBudget:
        """Find the smallest budget with a plan for a step; remember the plan."""
        self._comparisons.end(spec, options)
        alone = self._surroundings(spec, self._request(inputs, options))
        return smallest_budget(spec, replace(alone, earlier_inputs=()), options)

    def needed_bytes(self, freed_in: StepPeaks | None = None, least_bytes: int = 0) -> int:
        """Return the least budget for steps like the last; `least_bytes` if none is known.

        `freed_in`: a step in which saved tensors were freed; with `least_bytes` they are computed
        again.
        """
        if self._last is None or self.shares.has_others:
            return least_bytes
        spec, surroundings = self._last[0](), self._last[1]
        if spec is None:
            return least_bytes
        # By now gradients of more parameters may exist than the call was expected to make
        state_bytes = self._account.existing_state_bytes() + self._account.coming_state_bytes()
        surroundings = surroundings.with_state(state_bytes)
        if freed_in is not None:
            return needed_once_more(spec, surroundings, self._account, freed_in, least_bytes)
        return needed_by_steps(spec, surroundings, self._account, self._monitor.guard.open_step)

    def measuring_room_bytes(self, options: Options) -> int:
        """Return the bytes that operators may hold now while they are measured."""
        return self._comparisons.room_bytes(options)

    def _chosen(
        self, spec: Specialisation, request: PlanningRequest, waiting: Sequence[object]
    ) -> Planned:
        options = request.options
        self._comparisons.go_on(spec, options, waiting)
        spec.use_step_costs(options)
        alone = partial(self._surroundings, spec, request)
        surroundings = alone()
        since = self._account.since
        since.forward_begins(surroundings.gradient_bytes, self._account.gradient_versions)
        cleared_bytes = since.cleared_bytes
        settled, self._last_choice = self._last_choice, None
        may_stay = settled is not None and not (request.searches or options.compile)
        may_stay = may_stay and settled.holds(spec, surroundings, cleared_bytes)
        if may_stay and self.shares.is_alone(spec, options):
            self._last_choice = settled
            return settled.planned
        presumes = not (request.searches or spec.plans or self.shares.is_new(spec, options))
        self.shares.begin(spec, alone, options, presumes=presumes)
        known = tuple(spec.plans.values())
        if options.compile:
            self._account.lift_limit()  # memory of compiled plans is measured when they run
        try:
            planned = self._fitting(spec, request)
        except NeedsComparisons:
            self._comparisons.end(spec, options)
            self.shares.forget_needs(spec)
            self.shares.begin(spec, alone, options, presumes=presumes)
            planned = self._fitting(spec, request)
        if all(planned is not each for each in known):
            self._monitor.guard.leave_out_freed()  # making a plan makes Python collect garbage
            if options.compile:
                self._monitor.guard.restart()  # memory of compiling and trials belongs to no step
        if self.shares.is_alone(spec, options):
            plans = len(spec.plans)
            self._last_choice = _LastChoice(spec, alone(), cleared_bytes, planned, plans)
        return planned

    def _fitting(self, spec: Specialisation, request: PlanningRequest) -> Planned:
        """Return the plan of a step, with room for calls that may come if a plan leaves it."""
        surroundings, options = self._surroundings(spec, request), request.options
        share = self.shares.share(spec, surroundings, options)
        surroundings = surroundings.with_share(share)
        self._last = weakref.ref(spec), surroundings
        clearing = self._clearing(spec, surroundings, request)
        if clearing is not None:
            return clearing
        optimistic = self._optimistic(spec, surroundings, request)
        if optimistic is not None:
            self.more_bytes = 0
            return optimistic
        try:
            is_new = self.shares.is_new(spec, options)
            likely = partial(self._likely, spec, surroundings, request)
            first = replace(request, least=is_new, once=self.shares.presumes, before_search=likely)
            planned = planned_for(spec, surroundings, first)
        except (_NoneAtOnce, InfeasibleBudget) as error:
            if self.shares.presumes:
                self.shares.stop_expecting_call()
                return self._fitting(spec, request)
            assert isinstance(error, InfeasibleBudget)
            return self._with_less_expected(spec, surroundings, request, error)
        self.more_bytes = spec.more_held_bytes(planned, surroundings) + share.reserved_bytes
        return planned

    def _clearing(
        self, spec: Specialisation, surroundings: Surroundings, request: PlanningRequest
    ) -> Planned | None:
        """Return a plan for gradients that are cleared before the backward, as in earlier steps.

        None: no such plan fits, or requests above the limit are not refused.
        """
        options, cleared_bytes = request.options, self._account.since.cleared_bytes
        if not cleared_bytes or request.searches or options.compile or self.shares.presumes:
            return None
        if self.shares.has_others or not self._is_limited(options):
            return None
        without_them = without(surroundings, others_bytes=0, gradient_bytes=cleared_bytes)
        # code between may hold as much in addition to them before they are cleared
        outside_bytes = surroundings.outside_bytes + cleared_bytes
        own = without_them.surroundings.with_outside(outside_bytes)
        refused = self._never_cleared.setdefault(spec, set())
        if own in refused:
            return None
        try:
            planned = planned_for(spec, own, replace(request, before_search=_none_at_once))
        except (_NoneAtOnce, InfeasibleBudget):
            refused.add(own)
            return None
        if not without_them.fits_with(planned, options.planned_bytes):
            return None
        self.more_bytes = spec.more_held_bytes(planned, own)
        return planned

    def _optimistic(
        self, spec: Specialisation, surroundings: Surroundings, request: PlanningRequest
    ) -> Planned | None:
        """Return a plan without room for all expected memory, where no search found another."""
        was_refused = spec.was_refused(surroundings)
        if not (spec.was_optimistic or was_refused):
            return None
        if spec.fitting(spec.with_measured_user_code(surroundings)) is not None:
            return None
        held = self._held_at_call(spec, request)
        own = without_expected(surroundings, held)
        known = spec.optimistic(own)
        if known is not None:
            return self._improved(spec, surroundings, known, request)
        if not was_refused:
            return None
        less = less_expected(spec, surroundings, self._account, held, request.options)
        planned = self._leaving_less(spec, less, request)
        return None if planned is None else spec.add_optimistic(own, planned)

    def _improved(
        self,
        spec: Specialisation,
        surroundings: Surroundings,
        known: Planned,
        request: PlanningRequest,
    ) -> Planned:
        """Return a known plan without room for all expected memory, or a better plan."""
        better = improved(spec, known, request)
        if better is known:
            return known
        held = self._held_at_call(spec, request)
        less = less_expected(spec, surroundings, self._account, held, request.options)
        if not less.likely_to_come().fits_with(better, request.options.planned_bytes):
            return known
        return spec.add_optimistic(without_expected(surroundings, held), better)

    def _likely(
        self, spec: Specialisation, surroundings: Surroundings, request: PlanningRequest
    ) -> Planned | None:
        """Return a plan that is found at once, with room for what the loop is likely to hold.

        None: the step waits for a plan with room for all expected memory. Raises `_NoneAtOnce`
        where room is left for calls that may never come.
        """
        if self.shares.presumes:
            raise _NoneAtOnce
        options = request.options
        if request.searches or options.planner != DEFAULT:
            return None
        if self.shares.has_others or not self._is_limited(options):
            return None
        held = self._held_at_call(spec, request)
        less = less_expected(spec, surroundings, self._account, held, options)
        coming = less.likely_to_come()
        if coming.surroundings.room_bytes <= surroundings.room_bytes:
            return None
        planned = planned_at_once(spec, coming.surroundings, options, coming.released_bytes)
        if planned is None:
            least = coming.least(spec)
            if least.needed_bytes > options.planned_bytes:
                return None
            planned = planned_meanwhile(spec, coming.surroundings, least.plan, options)
        if planned is None:
            return None
        if spec not in self._leaves_less:
            self._leaves_less.add(spec)
            announce(
                f"{self._name}: it runs by a plan without room for all of {less.holders_text()}: "
                "loops like this free some of that in time. Requests beyond the budget are refused"
            )
        return spec.add_optimistic(without_expected(surroundings, held), planned)

    def _with_less_expected(
        self,
        spec: Specialisation,
        surroundings: Surroundings,
        request: PlanningRequest,
        error: InfeasibleBudget,
    ) -> Planned:
        """Return a plan without room for all expected memory.

        Raises `InfeasibleBudget` or `FitsEagerly` if none is allowed or fits.
        """
        account, options = self._account, request.options
        lacking_bytes = lacking_bytes_of(error)
        if isinstance(error, NoPlan):
            spec.least_budgets.learn(error.least)
        held = self._held_at_call(spec, request)
        less = less_expected(spec, surroundings, account, held, options)
        less = replace(less, may_be_alone=self._may_be_alone(spec, options))
        planned = self._leaving_less(spec, less, request)
        if planned is None:
            if not self._has_room_eagerly(spec, less, options) and self._frees(lacking_bytes):
                raise _MemoryFreed
            open_calls = self.shares.open_calls(spec, surroundings, options)
            try:
                expected = less if self._is_limited(options) else less.without_release()
                advice = advised(error, spec, expected, account, options, open_calls)
                if (advice.minimum_bytes or 0) <= options.planned_bytes:
                    # the search for advice took longer, and its plans are known now
                    planned = self._leaving_less(spec, less, request)
                    planned = planned or self._as_advised(spec, less, options)
                if planned is None:
                    self._monitor.guard.abandon()
                    raise self._fits_eagerly(spec, less, options, advice) or advice from None
            finally:
                del error  # its traceback holds this frame and the inputs
        if not spec.was_optimistic:
            announce(
                f"{self._name}: no plan has room for {less.holders_text()}. It runs by a plan "
                "without that room; requests beyond the budget are refused"
            )
        self.more_bytes = 0
        spec.note_refused(surroundings, lacking_bytes)
        return spec.add_optimistic(without_expected(surroundings, held), planned)

    def _fits_eagerly(
        self, spec: Specialisation, less: LessExpected, options: Options, error: InfeasibleBudget
    ) -> FitsEagerly | None:
        """Return that plain PyTorch may have room; None: not even for a forward."""
        if self._has_room_eagerly(spec, less, options):
            return FitsEagerly(error, has_backward=True)
        if less.may_be_alone and less.forward_alone_bytes(spec) <= most_bytes(options):
            return FitsEagerly(error, has_backward=False)
        return None

    def _has_room_eagerly(self, spec: Specialisation, less: LessExpected, options: Options) -> bool:
        """Whether plain PyTorch is expected to have room for a call and its backward."""
        if options.needs_plans or not self._may_leave_less(spec, less, options):
            return False
        return less.plain_bytes(spec) <= most_bytes(options)

    def _frees(self, lacking_bytes: int) -> bool:
        """Free garbage, else saved tensors of waiting calls; return whether there were any."""
        if self._account.collect_garbage():
            return True
        before_bytes = self._monitor.live_bytes() or 0
        is_freed = free_for(max(1, lacking_bytes), self._account.device) > 0
        self._monitor.guard.leave_out_freed(before_bytes - (self._monitor.live_bytes() or 0))
        return is_freed

    def _may_be_alone(self, spec: Specialisation, options: Options) -> bool:
        """Whether a call may run without room for its backward, as none may come.

        Only where another step has trained: then this call may be an evaluation.
        """
        if options.needs_plans or not self._is_limited(options):
            return False
        return any(other.plans for other in self._captures if other is not spec)

    def _is_limited(self, options: Options) -> bool:
        """Whether requests above the limit are refused, so that plans may be optimistic."""
        given = options.plan is not None or options.compile or options.arena
        return not given and options.ranks is None and refuses(self._account)

    def _may_leave_less(self, spec: Specialisation, less: LessExpected, options: Options) -> bool:
        """Whether a plan may leave no room for all expected memory.

        With other calls open: only if saved tensors can be freed for them, or plain PyTorch fits.
        """
        if not self._is_limited(options):
            return False
        if not (self.shares.has_others and options.needs_plans):
            return True
        return less.plain_bytes_now(spec) <= most_bytes(options)

    def _leaving_less(
        self, spec: Specialisation, less: LessExpected, request: PlanningRequest
    ) -> Planned | None:
        """Return a plan without room for all expected memory; None: none is allowed or fits."""
        options = request.options
        if not self._may_leave_less(spec, less, options):
            return None

        def planned_from(surroundings: Surroundings, known: Plan) -> Planned:
            return planned_for(spec, surroundings, replace(request, others=lambda: (known,)))

        plan_as = partial(planned_as, spec, options=options)
        return less.planned(spec, planned_from, plan_as, options.planned_bytes)

    def _as_advised(
        self, spec: Specialisation, less: LessExpected, options: Options
    ) -> Planned | None:
        """Return the least plan with room for what the loop is likely to hold, if it fits."""
        if not self._may_leave_less(spec, less, options):
            return None
        coming = less.likely_to_come()
        planned = planned_as(spec, coming.surroundings, coming.least(spec).plan, options=options)
        fits = planned is not None and coming.fits_with(planned, options.planned_bytes)
        return planned if fits else None

    def _surroundings(self, spec: Specialisation, request: PlanningRequest) -> Surroundings:
        return surroundings_of(spec, request.inputs, self._account, request.options)

    def _held_at_call(self, spec: Specialisation, request: PlanningRequest) -> HeldAtCall:
        others = request.options.others_in_budget(self._account)
        return self._account.held_at_call(request.inputs, others, spec.input_bytes)
