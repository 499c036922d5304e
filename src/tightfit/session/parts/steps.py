"""Steps of a model whose parts are planned one by one, all within one budget.

Code between the parts stays eager: it is measured in a first step, in which every part runs
the plan that holds least. Then each kind of part has the plan that makes the whole step cheapest
within the budget. A part that was not planned is judged by bytes held when it starts.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from tightfit.allocator.tally import describe_before_refusals, free_before_refusals
from tightfit.capture.captured import Captured, placeholder_tensors
from tightfit.capture.handed import GraphArguments
from tightfit.capture.opaque.needs import NoRoomToMeasure
from tightfit.capture.traced_call import TracedCall
from tightfit.errors import WITHOUT_A_PLAN, BadInput, InfeasibleBudget, without_frames
from tightfit.execution.guard import Guard, StepPeaks, left_out
from tightfit.execution.run_state import RunState
from tightfit.execution.runtime import Run
from tightfit.living import Living
from tightfit.plan.explain import PlannedPart
from tightfit.plan.plan import Plan
from tightfit.progress import Announcements, announce
from tightfit.session.memory.limit import raising
from tightfit.session.memory.surroundings import with_slack
from tightfit.session.options import Options
from tightfit.session.parts.again import PartRepeater, PartStep
from tightfit.session.parts.kinds import Kind, KnownCalls, Part, PartCall, forget_oldest
from tightfit.session.parts.planning import PartsSettings, StepPlans
from tightfit.session.report import Report
from tightfit.session.step.again import RepeatableCall
from tightfit.session.step.holding import Holding, overhead_of
from tightfit.session.step.ledger import StepLedger
from tightfit.session.step.observed import LedgerWriter
from tightfit.units import format_bytes

_ADVICE = f"Raise the budget, or hold less between the parts. {WITHOUT_A_PLAN}"


class Resident(Protocol):
    """The memory that a model in parts holds between its steps."""

    def resident_bytes(self) -> int:
        """Return the bytes held now."""

    def coming_bytes(self) -> int:
        """Return bytes that will stay once they exist: the optimizer's state."""

    def stepping_bytes(self) -> int:
        """Return bytes held while the optimizer steps, as far as predicted."""

    def gradient_bytes(self) -> int:
        """Return the bytes of gradients that exist now, as far as they are known."""

    def rest(self) -> None:
        """Note that no backward is awaited any more."""

    def name_budget(self, needed_bytes: int) -> bool:
        """Have errors of refused requests name a budget; return whether requests are refused."""


class PartSteps:
    """Runs the parts of a model by their plans.

    `capture`: given a call and a name, returns the captured step of a part. `settings`: those that
    depend on how the model is divided into parts.
    """

    def __init__(
        self,
        name: str,
        options: Options,
        device: str,
        resident: Resident,
        capture: Callable[[TracedCall, str], Captured],
        settings: PartsSettings,
    ) -> None:
        self.name = name
        self.guard = Guard(device, options.on_exceed, _ADVICE)
        self.plans = StepPlans(name, options, self.guard, settings)
        self.guard.change_budget(self.plans.limit_bytes)
        self.known = KnownCalls(capture)
        self._resident = resident
        self._open: Living[Run] = Living()
        self._writer: LedgerWriter | None = None
        self._last: tuple[StepLedger[Kind], int] | None = None
        self._has_accumulated = False  # whether a step has begun with gradients
        self._again = PartRepeater(self)
        self._announcements = Announcements()
        self._announced_eager: weakref.WeakSet[Part] = weakref.WeakSet()  # that was announced
        # Of calls that the budget had no room to measure: these say so, and are never raised
        self._unmeasured: dict[Any, InfeasibleBudget] = {}
        _EVERY.add(self)

    @property
    def writer(self) -> LedgerWriter | None:
        return self._writer

    def change_options(self, options: Options) -> None:
        """Plan the next step with other options; captured steps stay."""
        self.plans.change_options(options)
        self.guard.change_budget(self.plans.limit_bytes)
        self._unmeasured.clear()

    @property
    def is_under_way(self) -> bool:
        """Whether a call awaits its backward."""
        return any(run.is_open for run in self._open)

    def free_saved(self, lacking_bytes: int) -> int:
        """Free saved tensors of calls that await their backward; return how many bytes.

        The oldest first: its backward comes last. Such a step is no model of others.
        """
        freed_bytes = 0
        for run in self._open.now() if not self.plans.options.needs_plans else ():
            if freed_bytes < lacking_bytes:
                freed_bytes += run.free_saved()
        if freed_bytes:
            self.plans.note_freed()
            self.guard.note_freed_saved(freed_bytes)
        return freed_bytes

    def name_needed(self, lacking_bytes: int) -> None:
        """Have the error of a refused request name a budget, if it comes in the backward.

        By then saved tensors of the calls that await theirs were freed. The next step keeps some,
        the optimizer's state, and gradients that are accumulated. Where steps vary, later ones may
        need more than follows from this one.

        `lacking_bytes`: by which the request exceeds the limit.
        """
        writer = self._writer
        if writer is None or not (writer.has_begun_backward and self.is_under_way):
            return
        if self.known.vary:
            return
        ending_bytes = max(0, self.guard.live_bytes() - writer.begin_bytes)  # with the current call
        later_bytes = self.guard.held_bytes() - ending_bytes + _least_peak_of(writer.awaiting())
        needed_bytes = max(self.plans.limit_bytes + lacking_bytes, later_bytes)
        needed_bytes += self._resident.coming_bytes()
        if self._has_accumulated:
            needed_bytes += self.plans.later_gradient_bytes()
        self._resident.name_budget(with_slack(needed_bytes))

    # -- steps --------------------------------------------------------------------------------

    def begin(self, signature: Any) -> None:
        """Begin a step, unless one is running.

        `signature`: of the model's inputs.
        """
        if self.is_under_way:
            return
        self.close_step()
        self._resident.name_budget(0)
        self.known.settle_outputs()
        limit_bytes = self.plans.limit_bytes
        resident = self._resident
        self._has_accumulated = self._has_accumulated or resident.gradient_bytes() > 0
        self.guard.before_forward(
            resident.resident_bytes, limit_bytes, runs=self._open, is_known=True
        )
        self._plan_step(signature)
        if not self.plans.is_learned:
            self.guard.learn()
        self._writer = LedgerWriter(self.guard)

    def _plan_step(self, signature: Any) -> None:
        """Make sure that there are plans for the step that begins.

        What it holds in addition to its calls is expected as in another step: it may hold less.
        Where the limit holds by itself, it runs with least memory then, and is measured again: only
        a request that exceeds the limit shows that the budget is too small.
        """
        resident = self._resident
        try:
            self.plans.begin(signature, resident.coming_bytes(), resident.stepping_bytes())
        except InfeasibleBudget as error:
            needed_bytes, limit_bytes = error.minimum_bytes or 0, self.plans.limit_bytes
            if self.plans.options.needs_plans or not resident.name_budget(needed_bytes):
                raise
            self._announcements.tell(
                f"{self.name}: the plans that save least are expected to take "
                f"{format_bytes(needed_bytes)}, {format_bytes(needed_bytes - limit_bytes)} more "
                "than the budget. The step runs by them; requests beyond the budget are refused"
            )

    def close_step(self) -> StepPeaks | None:
        """End the current step; return its peaks.

        Raises `BudgetExceeded` if that was more than the budget, and the user asked to raise.
        """
        writer, self._writer = self._writer, None
        if writer is None:
            return self.guard.close()
        is_complete = writer.is_complete
        ledger = writer.ledger(self.guard.held_bytes() - self.guard.live_bytes())
        if is_complete:
            if self.guard.is_learning:
                self._last = ledger, self.plans.planned_bytes(ledger)
            self.plans.ended(ledger)
        return self.guard.close(_where(ledger))

    def abandon(self) -> None:
        """Forget the current step: it has failed."""
        self._writer = None
        self.guard.abandon()

    def report(self) -> Report:
        """Return promises of the plans and bytes held by the last complete step.

        Raises `BadInput` if no step has been taken yet.
        """
        ledger, planned_bytes = self._last_step()
        step = self.guard.steps[-1]
        overhead = overhead_of(ledger.holdings)
        return Report(
            budget_bytes=self.plans.limit_bytes,
            constant_bytes=step.constant_bytes,
            planned_peak_bytes=planned_bytes,
            overhead=overhead,
            bound=0.0,
            gap=overhead,
            status="feasible",
            cost_source=next((kind.captured.graph.cost_source for kind in ledger.calls), "none"),
            measured=step,
            plan=None,
            plans=_plans_in_use(ledger),
            calls=len(ledger.calls),
            parts=_parts_in_use(ledger),
        )

    def least_bytes(self) -> int:
        """Return the bytes of a step like the last complete one with the least plan of every part.

        Parts count that this step has left out and another may not.

        Raises `BadInput` if no step has been taken yet.
        """
        ledger, _ = self._last_step()
        outside = (each.peak_bytes for each in ledger.intervals if not each.is_planned)
        outside_bytes = ledger.base_bytes + max(outside, default=0)
        return max(self.plans.least_peak_bytes(ledger), outside_bytes)

    def needed_bytes(self) -> int:
        """Return the least budget for steps like that which ends now; 0: its backward is to come.

        The next step begins with what this one has left: gradients, and outputs of the model. They
        are expected to be gone as its backward begins. Inputs may be others, and as large.
        """
        writer = self._writer
        if writer is None or not writer.is_complete:
            return 0
        resident_bytes = self.guard.held_bytes() - self.guard.live_bytes()
        ledger = writer.ledger(resident_bytes + self._resident.coming_bytes())
        left_bytes = max(self.guard.live_bytes(), self._resident.gradient_bytes())
        return with_slack(self.plans.least_peak_bytes_after(ledger, left_bytes))

    def plain_bytes(self) -> int | None:
        """Return the peak of the last complete step with nothing recomputed; None: unknown."""
        if self._last is None:
            return None
        ledger, _ = self._last
        everything = ledger.peak_with({kind: kind.most for kind in ledger.calls})
        return max(everything, ledger.outside_bytes)

    def _last_step(self) -> tuple[StepLedger[Kind], int]:
        """Return the last complete step, and the peak that was planned for it."""
        if self._last is None:
            raise BadInput(
                f"{self.name} is planned part by part while it first runs: take one step, forward "
                "and backward"
            )
        return self._last

    # -- parts --------------------------------------------------------------------------------

    def kind_of(self, part: Part, given: GraphArguments) -> PartCall | InfeasibleBudget | None:
        """Return the kind of a call of a part, captured the first time; None without a gradient.

        Where the budget has no room to measure it, the error that says so is returned: it may run
        without a plan. Raises `BadInput` or `CaptureError` or `OpaqueChanged` if the part cannot
        be captured.
        """
        if self._writer is None or not part.needs_gradient(given):
            return None
        known = self.known.known(part, given)
        if known is not None:
            return known
        key = part.key(given)
        if key not in self._unmeasured:
            try:
                return self.captured_again(part, given)
            except NoRoomToMeasure as error:
                if self.plans.options.needs_plans:
                    raise
                self._unmeasured[key] = without_frames(error)
                forget_oldest(self._unmeasured)
        return without_frames(self._unmeasured[key])

    def captured_again(self, part: Part, given: GraphArguments) -> PartCall:
        """Capture a call; memory for that belongs to no step."""
        with self.unmeasured(), self.guard.paused():
            return self.known.capture(part, given, self.plans.options)

    @contextlib.contextmanager
    def unmeasured(self) -> Iterator[None]:
        if self._writer is not None:
            self._writer.end_interval()
        with left_out():
            yield

    def run(
        self, part: Part, call: PartCall | InfeasibleBudget | None, given: GraphArguments
    ) -> Any:
        """Run one forward of a part by its plan; its own forward if nothing needs a gradient.

        Where no plan fits the rest of the budget, or there was no room to measure, it runs as plain
        PyTorch, if its limit still holds.

        Raises `InfeasibleBudget` if that does not fit either.
        """
        writer = self._writer
        if call is None or writer is None:
            return part.function(*given.args, **given.kwargs)
        if isinstance(call, InfeasibleBudget):
            return self._run_eagerly(part, given, call)
        kind, key = call.kind, call.key  # a call that awaits its backward must not hold the inputs
        try:
            holding = self._holding_for(part, kind)
        except InfeasibleBudget as error:
            return self._run_eagerly(part, given, error)
        number = writer.forward_begins(kind, holding, part)

        def started(run: Run) -> None:
            self.known.learn_outputs(part, key, run)
            if run.reached.backwards > 1:
                return  # a forward that runs again is a call of its own
            is_first = not writer.has_begun_backward
            writer.backward_begins(number)
            if is_first:
                self.guard.before_backward()

        def finished(run: Run) -> None:
            if run.state is RunState.FAILED:
                self.abandon()
            elif self._writer is not None:
                self._writer.backward_ended()
                if self._writer.is_complete:
                    self.guard.after_backward()
            is_last = run.state is not RunState.DIFFERENTIATED  # else derived calls are to come
            if is_last and not self.is_under_way:
                self._resident.rest()

        step = PartStep(weakref.ref(part), kind, key)
        again = None
        if not part.is_gathered:
            again = RepeatableCall(weakref.ref(self._again), step, call.given)
        run = Run(started, finished, again, self._announcements.tell)
        self._open.add(run)
        weakref.finalize(run, _drop, writer, self.guard, number)
        leaves = kind.inputs(call.given.leaves)
        inputs = placeholder_tensors(kind.captured.joint, part.modules, leaves)
        runner = kind.runner(holding)
        outputs = runner(inputs, run)
        if again is not None:
            again.note_state(inputs)
            leaves = len(call.given.leaves)
            kept = step.leaves_of(runner.program.kept, leaves)
            written = step.leaves_of([p for _, p in kind.captured.joint.write_backs], leaves)
            again.hold_only(kept, written)
        writer.forward_ended(number)
        return kind.captured.joint.structure.filled(outputs)

    def _holding_for(self, part: Part, kind: Kind) -> Holding:
        """Return the plan of a part; the least, if it fits for now and the limit holds by itself.

        Raises `InfeasibleBudget` if no plan has room.
        """
        try:
            return self.plans.holding_for(part, kind)
        except InfeasibleBudget as error:
            if not self._resident.name_budget(error.minimum_bytes or 0):
                raise
            least = self.plans.least_for_now(part, kind)
            if least is None:
                raise
        self._announcements.tell(
            f"{self.name}: no plans of its parts have room for what is held now and for memory "
            "that is to come. Parts run by the plans that save least; requests beyond the "
            "budget are refused"
        )
        return least

    def _run_eagerly(self, part: Part, given: GraphArguments, error: InfeasibleBudget) -> Any:
        """Run a part that no plan has room for as it is: requests above the limit are refused."""
        if not self._resident.name_budget(error.minimum_bytes or 0):
            raise error
        if part not in self._announced_eager:
            self._announced_eager.add(part)
            why = "no plan fits the rest of the budget"
            if part.key(given) in self._unmeasured:
                why = "the budget has no room to measure a module that runs as one op"
            announce(
                f"part {part.name!r}: {why}. It runs as plain PyTorch there; requests beyond the "
                "budget are refused"
            )
        with raising(error):
            return part.function(*given.args, **given.kwargs)


_EVERY: Living[PartSteps] = Living()


def _free_saved(lacking_bytes: int, device: torch.device) -> int:
    """Free saved tensors of calls of parts on a device; return how many bytes."""
    freed_bytes = 0
    for steps in _EVERY:
        if freed_bytes < lacking_bytes and torch.device(steps.guard.device) == device:
            freed_bytes += steps.free_saved(lacking_bytes - freed_bytes)
    return freed_bytes


free_before_refusals(_free_saved)


def _least_peak_of(awaiting: Sequence[Kind]) -> int:
    """Return the most that calls hold until the last backward, if each keeps what is best."""
    lower, upper = 0, sum(kind.most.peak_bytes + kind.least.peak_bytes for kind in awaiting)
    while lower < upper:
        middle = (lower + upper) // 2
        lower, upper = (lower, middle) if _have_room(awaiting, middle) else (middle + 1, upper)
    return upper


def _have_room(awaiting: Sequence[Kind], limit_bytes: int) -> bool:
    """Whether a limit has room for the backwards of calls, the last call's first."""
    saved_bytes = 0
    for kind in awaiting:
        left_bytes = limit_bytes - saved_bytes
        both = (kind.least, kind.most)
        fitting = [
            own.saved_bytes for own in both if own.saved_bytes + own.rise_bytes <= left_bytes
        ]
        if not fitting:
            return False
        saved_bytes += min(fitting)
    return True


def _name_needed(lacking_bytes: int, is_optional: bool) -> None:
    for steps in _EVERY if not is_optional else ():
        steps.name_needed(lacking_bytes)


describe_before_refusals(_name_needed)


def _drop(writer: LedgerWriter, guard: Guard, call: int) -> None:
    """Note that no output of a call is left."""
    if writer.awaits(call):
        writer.dropped(call)
        if writer.has_begun_backward and writer.is_complete:
            guard.after_backward()


def _plans_in_use(ledger: StepLedger[Kind]) -> dict[str, tuple[Plan, ...]]:
    """Return the plans that the calls of each kind ran, in the order of the first calls."""
    used: dict[str, dict[Holding, None]] = {}
    for kind, holding in zip(ledger.calls, ledger.holdings, strict=True):
        used.setdefault(kind.name, {})[holding] = None
    return {name: tuple(holding.plan for holding in holdings) for name, holdings in used.items()}


def _parts_in_use(ledger: StepLedger[Kind]) -> tuple[PlannedPart, ...]:
    """Return every plan that ran with the step it is of."""
    calls = Counter(zip(ledger.calls, ledger.holdings, strict=True))
    return tuple(
        PlannedPart(kind.name, kind.captured.graph, holding.plan, count)
        for (kind, holding), count in calls.items()
    )


def _where(ledger: StepLedger[Kind]) -> str:
    """Say where a step had its peak."""
    highest = max(ledger.intervals, key=lambda interval: interval.peak_bytes)
    if highest.phase == "between":
        return "between the planned parts (other modules, the loss, communication, the optimizer)"
    return f"in the {highest.phase} of part {ledger.calls[highest.call].name!r}"
