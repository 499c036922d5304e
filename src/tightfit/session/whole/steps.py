"""Runs a callee as planned steps, each of which is one graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from tightfit.allocator.refusal_details import BEFORE_BACKWARD, UNKNOWN, before_first_call
from tightfit.allocator.tally import free_before_refusals
from tightfit.capture.handed import GraphArguments
from tightfit.capture.side_effects.generators import GeneratorStates, generators_of
from tightfit.capture.trace.garbage import fewer_collections
from tightfit.errors import BadInput, InfeasibleBudget, OpaqueChanged, OpaqueVaries, no_plan_fits
from tightfit.execution.attach import own_methods
from tightfit.execution.guard import Guard, StepPeaks, left_out
from tightfit.execution.run_state import RunState
from tightfit.execution.runtime import Run, Runner
from tightfit.living import Living
from tightfit.planners.questions.minimum import MinimumBudget
from tightfit.progress import Announcements, announce
from tightfit.session.callee import Callee
from tightfit.session.default_addresses import DefaultAddresses, PlanRejected
from tightfit.session.memory.account import Account
from tightfit.session.memory.double_backward import DoubleBackwardSteps, NeedsLessEagerly
from tightfit.session.memory.surroundings import with_slack
from tightfit.session.options import Options
from tightfit.session.outputs import OTHER_GRADIENTS
from tightfit.session.report import Report
from tightfit.session.step.again import RepeatableCall
from tightfit.session.whole.again import StepRepeater
from tightfit.session.whole.captures import Captures
from tightfit.session.whole.learning import LastStep, StepMonitor
from tightfit.session.whole.optimistic import FitsEagerly
from tightfit.session.whole.plans import Plans
from tightfit.session.whole.specialisation import Planned, Specialisation
from tightfit.session.whole.user_code import OpenCall, PlannedForward
from tightfit.units import format_bytes

_MOST_ATTEMPTS = 8


class WholeSteps:
    """Runs a callee as planned steps.

    `runs`: the calls whose outputs are still held.
    """

    def __init__(
        self, callee: Callee, options: Options, account: Account, addresses: DefaultAddresses
    ) -> None:
        self.callee = callee
        self.options = options
        self.account = account
        self.captures = Captures(callee)
        self.monitor = StepMonitor(callee.name, account, options.on_exceed)
        self.last: Planned | None = None
        self.runs: Living[Run] = Living()
        self.double_backward = DoubleBackwardSteps(account)
        self._addresses = addresses
        self._plans = Plans(callee, self.captures, account, addresses, self.monitor)
        has_loss_outside = callee.root is not None
        origin = BEFORE_BACKWARD if has_loss_outside else UNKNOWN
        methods = own_methods(type(callee.root)) if has_loss_outside else ()
        needs = weakref.WeakMethod(self.needed_bytes)
        self._open_call = OpenCall(account, origin, before_first_call(methods), needs)
        self._calls = 0
        # The step of the running backward, if its saved tensors were freed before it
        self._freed_in: StepPeaks | None = None
        self._enough_bytes = 0  # a budget with which they would not have been freed
        self._announcements = Announcements()
        self._repeater = StepRepeater(
            self.captures,
            weakref.WeakMethod(self._replanned),
            weakref.WeakMethod(self._planned_once_more),
        )
        self._reference = weakref.ref(self)
        self._ended = _while_alive(self._reference, WholeSteps._backward_ended)
        _ALL_STEPS.add(self)

    # -- calling ------------------------------------------------------------------------------

    @property
    def waiting(self) -> list[Run]:
        living = self.runs.now()
        return [run for run in living if run.is_open] if living else living

    @property
    def guard(self) -> Guard:
        return self.monitor.guard

    @property
    def is_used(self) -> bool:
        return self._calls > 0

    def __call__(self, given: GraphArguments) -> Any:
        """Run one planned forward.

        Raises `CaptureError` if it cannot be captured as a whole, `FitsEagerly`, and
        `NeedsLessEagerly`.
        """
        spec = self._specialisation(given, waits=True)
        if self.double_backward.runs_eagerly(spec.key) and not self.options.needs_plans:
            raise NeedsLessEagerly
        inputs = self.captures.inputs(spec, given)
        if self.options.steps is not None:
            self.options.steps.before_forward()
        self._begin(spec, inputs)
        spec, outputs = self._run_with_leaves(spec, given, inputs)
        self.guard.after_forward()
        if self.last is not None:
            graph, plan = self.last.graph, self.last.outcome.plan
            unmet = spec.unmet_by(self.last)
            forward = PlannedForward(spec.captured, spec.user_code, graph, plan, unmet)
            self._open_call.forward_ended(forward)
        self._plans.shares.window(self.options).forward_ended(self.monitor.live_bytes())
        return spec.captured.joint.structure.filled(outputs)

    def prepare(self, given: GraphArguments, *, quickly: bool = False) -> None:
        """Capture, price and plan for the given inputs without running anything."""
        spec = self._specialisation(given, waits=quickly)
        self.last = self._planned(spec, self.captures.inputs(spec, given), searches=not quickly)
        self._plans.shares.prepared(spec, runs_next=quickly)

    def settle(self) -> None:
        """Do nothing: the report is of the last step that has ended."""

    def report(self) -> Report:
        """Return figures of the current plan and bytes held by the last step.

        Raises `BadInput` if nothing has been planned yet.
        """
        if self.last is None:
            raise BadInput(
                "nothing is planned yet: call the model once, or tightfit.prepare(model, *inputs)"
            )
        return self.last.report(self._plans.more_bytes, self.options.usable_bytes, self.guard.steps)

    def close_step(self) -> StepPeaks | None:
        return self.guard.close()

    def change_options(self, options: Options) -> None:
        if _plans_are_outdated(options, self.options):
            for spec in self.captures:
                spec.forget_plans()
            self.monitor.learn_again()
        self.options = options

    def measure_again(self) -> None:
        self.monitor.forget()

    def capture_again(self) -> None:
        """Drop all captures: they were made for this rank alone."""
        self.captures.forget_all()
        self.measure_again()

    @property
    def is_tuning(self) -> bool:
        """Whether steps like the last are still timed, or compare alternatives."""
        last = max(self.captures, key=lambda spec: spec.used, default=None)
        return last is not None and (last.tuner is not None or last.has_comparisons)

    def needed_bytes(self) -> int:
        return self._plans.needed_bytes()

    # -- budgets ------------------------------------------------------------------------------

    def smallest_budget(self, given: GraphArguments) -> MinimumBudget:
        """Find the smallest budget with a plan for these inputs; remember the plan."""
        spec = self._specialisation(given)
        return self._plans.smallest_budget(spec, self.captures.inputs(spec, given), self.options)

    # -- one step -----------------------------------------------------------------------------

    def _specialisation(self, given: GraphArguments, *, waits: bool = False) -> Specialisation:
        """Return the captured step for inputs and modules of now."""
        return self._captured(self.captures.signature(given), given, waits=waits)

    def _captured(self, key: Any, given: GraphArguments, *, waits: bool = True) -> Specialisation:
        """Return the captured step of a signature; `waits`: whether a step waits for it."""
        spec = self.captures.find(key, given)
        if spec is None:
            if waits and self.options.ranks is None and self.captures.note_miss(key, given):
                self._varies()
            if len(self.captures):
                announce(_why_new_plan(self.callee.name, self.captures.changed(key, given)))
            spec = self._capture(key, given, waits=waits)
            if self.options.ranks is None:
                self._note_trained(spec, given)
        spec.use(self._calls)
        return spec

    def _note_trained(self, spec: Specialisation, given: GraphArguments) -> None:
        """Note the parameters that a captured step has gradients for."""
        joint, inputs = spec.captured.joint, self.captures.inputs(spec, given)
        places = [i for _, i in (*joint.gradients, *joint.stepped)]
        members = [inputs[i] for i in places if joint.sources[i].kind == "parameter"]
        self.account.optimizers.note_planned(members)

    def _varies(self) -> None:
        """Do nothing: numbers decide which code runs, and each call is planned again."""

    def _capture(self, key: Any, given: GraphArguments, *, waits: bool) -> Specialisation:
        if self.options.shared is not None:
            self.options.shared.close_steps()
        else:
            self.close_step()  # memory of capture and measurements belongs to no step
        self.account.locate()
        call = self.captures.traced_call(key, given, compiled=self.options.compile)
        room_bytes = self._plans.measuring_room_bytes(self.options) if waits else None
        with left_out(), fewer_collections():
            return self.captures.capture(key, call, self.options, self._calls, room_bytes)

    def _begin(self, spec: Specialisation, inputs: list[Any]) -> None:
        """Begin to measure a captured step."""
        alone = not self.waiting and self._plans.shares.was_alone(self.options)
        more_bytes = self._plans.more_bytes
        last = None if self.last is None else LastStep(self.last, alone, more_bytes)
        self.monitor.begin(spec, self.options, inputs, self.runs, last)

    def _run_with_leaves(
        self, spec: Specialisation, given: GraphArguments, inputs: list[Any]
    ) -> tuple[Specialisation, list[Any]]:
        """Run a forward, planned again if a leaf of its graph has kept more than was measured.

        A forward that ends early has changed nothing: buffers are written at its end, and the
        states of generators are restored. Returns the step that ran at last, and flat outputs.

        Raises `OpaqueVaries` if a leaf returns other kinds of outputs in every step. Raises
        `OpaqueChanged` if a leaf keeps more each time it runs.
        """
        for attempt in range(_MOST_ATTEMPTS):
            opaque = spec.captured.joint.opaque
            if not opaque.calls:
                break
            before = GeneratorStates(generators_of(self.callee.modules))
            try:
                return spec, self._run(spec, given, inputs)
            except (OpaqueChanged, OpaqueVaries) as change:
                # a module writes its buffers when it runs
                if opaque.changes_state or attempt == _MOST_ATTEMPTS - 1:
                    raise
                before.restore()
                if isinstance(change, OpaqueVaries):
                    self.guard.abandon()
                    raise
                announce(str(change))
            self.captures.forget(spec)
            spec = self._captured(spec.key, given)
            inputs = self.captures.inputs(spec, given)
        return spec, self._run(spec, given, inputs)

    def _run(self, spec: Specialisation, given: GraphArguments, inputs: list[Any]) -> list[Any]:
        """Run the forward of a plan; return its flattened outputs."""
        waiting = self.waiting
        planned = self.last = self._plans.chosen(spec, inputs, self.options, waiting)
        options = self._addresses.accept(planned, self.options)
        if options is not self.options:
            raise PlanRejected(options)
        self._addresses.begin_step((spec.key, planned.number), self)
        again = RepeatableCall(weakref.ref(self._repeater), spec, given)
        may_repeat = spec.captured.stepper is None
        started = _while_alive(self._reference, WholeSteps._backward_started, spec)
        run = Run(started, self._ended, again if may_repeat else None, self._announcements.tell)
        self.runs.add(run)
        self._plans.shares.called(spec, run, self.options, self.monitor.live_bytes())
        self._calls += 1
        outputs = _runner_of(spec, planned, self._addresses)(inputs, run)
        again.note_state(inputs)
        self.account.since.forward_ended(outputs)
        self._note_forward(spec, planned, is_first=not waiting)
        return outputs

    def _note_forward(self, spec: Specialisation, planned: Planned, *, is_first: bool) -> None:
        """Note that a forward has run; `is_first`: no other awaited its backward before it."""

    def _replanned(self, unfit: Specialisation, given: GraphArguments) -> Runner:
        """Plan a call again in its backward: its outputs have other gradients than expected."""
        self.guard.abandon()
        spec = self._capture(unfit.key, given, waits=True)
        planned = self.last = self._planned(spec, self.captures.inputs(spec, given))
        if not spec.captured.joint.other_strides:
            announce(f"{self.callee.name}: {OTHER_GRADIENTS}: planned again")
        return planned.runner

    def _planned_once_more(self, spec: Specialisation, inputs: list[Any]) -> Runner:
        """Plan a call again for its backward, with memory held now."""
        try:
            return self._plans.chosen_once_more(spec, inputs, self.options).runner
        except InfeasibleBudget as error:
            needed_bytes, was_freed = error.minimum_bytes or 0, self._freed_in is not None
            if self._enough_bytes > error.budget_bytes:
                needed_bytes = min(needed_bytes, self._enough_bytes)
            elif was_freed:
                needed_bytes = self._plans.needed_bytes(self._freed_in, needed_bytes)
            raise _no_room_once_more(
                self.callee.name, error, needed_bytes, was_freed=was_freed
            ) from None

    def _planned(
        self, spec: Specialisation, inputs: list[Any], *, searches: bool = False
    ) -> Planned:
        """Return a plan for memory held now; `searches`: before training, not in the background."""
        try:
            return self._plans.chosen(spec, inputs, self.options, self.waiting, searches=searches)
        except FitsEagerly as fits:
            raise fits.error from None

    # -- backward -----------------------------------------------------------------------------

    @property
    def repeatable(self) -> list[Run]:
        """The calls that await their backward and may run their forward again for it."""
        return [] if self.options.needs_plans else self.waiting

    def _backward_ended(self, run: Run) -> None:
        self.account.since.backward_ended()
        is_differentiated = run.state is RunState.DIFFERENTIATED  # derived calls are to come
        if not is_differentiated:
            self._open_call.end()
        self.monitor.after_backward(run)
        self._plans.shares.window(self.options).backward_ended()
        shared = self.options.shared
        is_open = self.waiting if shared is None else shared.open_members()
        if not (is_differentiated or is_open):
            for member in (self.account,) if shared is None else shared.members():
                member.rest()

    def _backward_started(self, spec: Specialisation, run: Run) -> None:
        if spec.tuner is not None:
            spec.tuner.begin()
        self._freed_in, self._enough_bytes = None, 0
        if run.freed_bytes is not None:
            self._enough_bytes = self._open_call.enough_bytes(run.freed_bytes)
        if run.reached.backwards == 1:
            self._open_call.backward_begins()
            self.account.since.backward_begins(self.account.gradient_bytes)
            if torch.is_grad_enabled():
                self.account.since.backward_is_unusual()
                self._open_call.note_differentiated()
                self.double_backward.begins(spec.key)
            self.guard.before_backward()
        else:
            self.account.since.backward_is_unusual()
        if run.reached.backwards > 1 or run.state is RunState.ONCE_MORE:
            step = self.guard.close()  # the planned step is over; later work belongs to no step
            self._freed_in = step if run.freed_bytes is not None else None
        self.captures.learn_outputs(spec, run)


_ALL_STEPS: Living[WholeSteps] = Living()


def _free_saved(lacking_bytes: int, device: torch.device) -> int:
    """Free saved tensors of calls of any callable on a device; return how many bytes.

    Of each callable those of the oldest call first: its backward comes last.
    """
    here = [steps for steps in _ALL_STEPS.now() if steps.account.device == device]
    freed_bytes = 0
    for run in (run for steps in here for run in steps.repeatable):
        if freed_bytes < lacking_bytes:
            freed_bytes += run.free_saved()
    for steps in here:
        steps.guard.note_freed_saved(freed_bytes)
    return freed_bytes


free_before_refusals(_free_saved)


def _while_alive(
    owner: weakref.ref[WholeSteps], method: Callable[..., None], *args: Any
) -> Callable[[Run], None]:
    """Return a function that calls a method with a run, and does not keep its owner alive.

    A buffer of the model may hold the history of a call, which could otherwise not be freed.
    """

    def call(run: Run) -> None:
        if (found := owner()) is not None:
            method(found, *args, run)

    return call


def _why_new_plan(name: str, change: str | None) -> str:
    if change is not None:
        return f"{name}: {change}: making a new plan"
    return f"{name} is called with new inputs or flags: making a new plan"


def _plans_are_outdated(options: Options, before: Options) -> bool:
    """Whether plans made with other options differ from plans made now."""
    return any(
        getattr(options, name) != getattr(before, name)
        for name in ("budget_bytes", "reserve_bytes", "planner", "limits", "plan", "compile")
    )


def _no_room_once_more(
    name: str, error: InfeasibleBudget, needed_bytes: int, *, was_freed: bool
) -> InfeasibleBudget:
    """Return the error that a call cannot be run once more with the memory held now.

    `needed_bytes`: a budget for steps like it. `was_freed`: whether its saved tensors were freed.
    """
    needed_bytes = with_slack(needed_bytes)
    why = "an earlier backward has used its saved tensors"
    if was_freed:
        why = (
            "its saved tensors were freed, as there was no room for what came before that. "
            "If that is a loss, tightfit.step plans it, too"
        )
    budget = f"the budget of {format_bytes(error.budget_bytes)}"
    return InfeasibleBudget(
        f"{no_plan_fits(name, budget, proven=False)}"
        f"\n  once more its forward is to run again in its backward: {why}"
        f"\n  try       a budget of {needed_bytes} bytes ({format_bytes(needed_bytes)})",
        budget_bytes=error.budget_bytes,
        minimum_bytes=needed_bytes,
    )


def _runner_of(spec: Specialisation, planned: Planned, addresses: DefaultAddresses) -> Runner:
    """Return the runner of a plan at its addresses; anywhere while operators are timed."""
    plan = planned.outcome.plan
    if spec.tuner is not None:
        spec.tuner.begin_step()
    if plan is None or spec.tuner is not None or planned.compiled is not None:
        return planned.runner
    return addresses.runner_for(planned.number, planned.graph, plan, planned.runner)
