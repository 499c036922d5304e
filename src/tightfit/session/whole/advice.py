"""The budget that an error advises: it suffices for later steps, too."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from tightfit.capture.captured import Captured
from tightfit.capture.nodes import flat_outputs, storage_bytes
from tightfit.errors import InfeasibleBudget
from tightfit.execution.guard import StepPeaks
from tightfit.graph.ir import Graph
from tightfit.planners.base import Limits, Task
from tightfit.planners.outcomes import no_plan
from tightfit.planners.questions.infeasible import (
    Expected,
    NoPlan,
    infeasible,
    infeasible_message,
)
from tightfit.planners.questions.minimum import MinimumBudget
from tightfit.session.memory.account import Account
from tightfit.session.memory.surroundings import (
    Surroundings,
    expected_outside_bytes,
    forward_output_bytes,
    kept_by_loss_bytes,
    with_slack,
)
from tightfit.session.options import Options
from tightfit.session.step.gradient_lives import gradient_lives, staying_bytes_of
from tightfit.session.whole.optimistic import LessExpected, NeededBudget, ReleasingStep
from tightfit.session.whole.specialisation import Specialisation
from tightfit.units import format_bytes

_QUICKLY = Limits(seconds=2.0)
_ESTIMATED = 64  # the estimated need of several calls may be too small by this part


@dataclass(frozen=True)
class OpenCalls:
    """The other calls that are open at the same time as a call."""

    waiting: int  # earlier calls of the same callable that await their backward
    least_bytes: int = 0  # the least that calls to come keep
    own_bytes: int = 0  # needed by the call itself if it keeps least
    all_calls_bytes: int = 0  # needed by all calls of the step, where others share the budget
    spare_bytes: int = 0  # kept by waiting calls beyond what they must keep

    @property
    def is_alone(self) -> bool:
        return not (self.waiting or self.least_bytes or self.all_calls_bytes)


def advised(
    error: InfeasibleBudget,
    spec: Specialisation,
    less: LessExpected,
    account: Account,
    options: Options,
    open_calls: OpenCalls,
) -> InfeasibleBudget:
    """Return an error that names a budget which suffices for later steps of the same kind.

    Memory counts as long as it is held: outputs of a forward until the next has ended, gradients
    that an optimizer has used until the backward. Where no optimizer has stepped yet, calls may add
    to gradients before it does.

    `error`: names the least budget of the call. `less`: memory resident around it.
    """
    loop = _Loop(spec, less, account, open_calls)
    this_call, held_bytes = None, less.held_bytes
    if open_calls.is_alone:
        seconds = max(_QUICKLY.seconds, options.limits.seconds / 2)  # the loop has stopped
        limits = msgspec.structs.replace(options.limits, seconds=seconds)
        this_call = _needed_budget(spec, loop.each, limits, now=less.present)
        call_bytes, held_bytes = this_call.needed_bytes, less.held_by(loop.each)
    else:
        error = _with_more_room(error, spec, less)
        call_bytes = error.minimum_bytes or 0
    needed = loop.needed_bytes(call_bytes)
    if max(needed.values()) <= options.planned_bytes:  # too small, with what calls keep
        as_kept = replace(loop, open_calls=replace(open_calls, spare_bytes=0))
        needed = as_kept.needed_bytes(call_bytes)
    most = max(needed, key=needed.__getitem__)
    needed_bytes = needed[most] + options.reserve_bytes
    if less.may_free and open_calls.is_alone:
        freed = replace(loop.each, surroundings=less.if_freed(loop.each.surroundings))
        plain_bytes = with_slack(freed.plain_bytes(spec)) + options.reserve_bytes
        needed_bytes = min(needed_bytes, plain_bytes)
    text, proven = str(error), error.proven
    if isinstance(error, NoPlan):
        least, proven_bytes = error.least, less.proven_bytes(spec)
        if this_call is None:
            this_call = NeededBudget(error.task.graph, least.plan, least.found_bytes)
        named = this_call.graph, this_call.plan, this_call.needed_bytes
        expected = Expected(*named, held_bytes, proven_bytes, needed_bytes)
        text = infeasible_message(error.task, error.outcome, least, expected)
        if proven_bytes is not None:
            proven = proven and proven_bytes > options.planned_bytes
    text += _later_text(most, needed_bytes, open_calls) + _forward_text(spec, less)
    return InfeasibleBudget(
        text,
        budget_bytes=error.budget_bytes,
        minimum_bytes=needed_bytes,
        proven=proven,
        call_bytes=error.minimum_bytes,
    )


_SINGULAR = ("the optimizer's step", "code between steps")


@dataclass(frozen=True)
class _Loop:
    """The loop around a call: the budget that each part of it needs."""

    spec: Specialisation
    less: LessExpected
    account: Account
    open_calls: OpenCalls

    @cached_property
    def _returned_bytes(self) -> int:
        """Bytes of outputs that the loop holds until the next call has ended."""
        known = self.account.since.returned_bytes(self.account.tally)
        return self._coming_bytes if known is None else known

    @cached_property
    def _coming_bytes(self) -> int:
        """Bytes of these outputs that are not held yet, as no call has ended."""
        if self.account.since.returned_bytes(self.account.tally) is not None:
            return 0
        return forward_output_bytes(self.spec.captured) + kept_by_loss_bytes(self.spec.captured)

    @cached_property
    def _new_gradient_bytes(self) -> int:
        return self.account.new_gradient_bytes() + self.less.used_gradient_bytes

    @cached_property
    def each(self) -> ReleasingStep:
        """A call with all memory that is likely to be held around it."""
        coming = self.less.likely_to_come()
        released_bytes = max(coming.released_bytes, self._returned_bytes)
        return replace(coming, released_bytes=released_bytes)

    def needed_bytes(self, call_bytes: int) -> dict[str, int]:
        """Return budgets by what needs them; `call_bytes`: the budget of the call by itself."""
        step_bytes, rise_bytes = self._step_bytes, self.account.loop_peaks.rise_bytes
        every = {"this call": call_bytes, "the optimizer's step": step_bytes}
        if rise_bytes:
            temporary_bytes = self.account.optimizers.temporary_bytes()
            every["code between steps"] = step_bytes - temporary_bytes + rise_bytes
        calls = self.open_calls
        if calls.all_calls_bytes:
            every["calls within the same budget"] = calls.all_calls_bytes + self._coming_bytes
        elif calls.waiting:
            every["calls that await their backward"] = self._waiting_bytes
        every = {holder: size - calls.spare_bytes for holder, size in every.items()}
        needed = {holder: with_slack(size) for holder, size in every.items()}
        if not self.account.since.has_stepped:
            needed["calls that add to gradients"] = self._adding_bytes(max(every.values()))
        if calls.waiting:  # what others need is estimated, not searched
            needed = {holder: size + size // _ESTIMATED for holder, size in needed.items()}
        return needed

    @cached_property
    def _waiting_bytes(self) -> int:
        """Bytes with which a first call leaves room for the calls that wait with it."""
        resident_bytes = self.less.surroundings.graph_of(self.spec.captured).constant_bytes
        new_bytes = self.account.new_gradient_bytes()
        return resident_bytes + new_bytes + self.open_calls.least_bytes + self.open_calls.own_bytes

    @cached_property
    def _step_bytes(self) -> int:
        """Bytes held while the optimizer steps."""
        graph = self.each.surroundings.graph_of(self.spec.captured)
        new_bytes = self._new_gradient_bytes + self._returned_bytes
        return graph.constant_bytes + new_bytes + self.account.optimizers.temporary_bytes()

    def _adding_bytes(self, enough_bytes: int) -> int:
        """Return the budget of calls that add to gradients; at least `enough_bytes` is advised."""
        adding = replace(self.each.surroundings, gradients="accumulated")
        gradient_bytes = adding.gradient_bytes + self._new_gradient_bytes
        step = replace(self.each, surroundings=replace(adding, gradient_bytes=gradient_bytes))
        now = self.less.present
        needed_bytes = _needed_budget(
            self.spec, step, now=now, enough_bytes=enough_bytes
        ).needed_bytes
        needed_bytes += self.open_calls.least_bytes - self.open_calls.spare_bytes
        needed_bytes = with_slack(needed_bytes)
        if not self.open_calls.is_alone:
            return needed_bytes
        # not seen yet: no more than plain PyTorch takes without them
        plain_bytes = max(self.each.plain_bytes(self.spec), self._step_bytes)
        return min(needed_bytes, plain_bytes)


def needed_by_steps(
    spec: Specialisation, surroundings: Surroundings, account: Account, step: StepPeaks | None
) -> int:
    """Return the least budget for steps like the last, without the optimizer's step.

    `surroundings`: with all expected memory. `step`: its peaks; None: its backward has not begun.
    """
    measured = _as_measured(spec, surroundings, account, step)
    if account.hooks_step:  # such steps run in the order of plain PyTorch only
        return with_slack(measured.plain_bytes(spec))
    return with_slack(_needed_budget(spec, measured, now=surroundings).needed_bytes)


def needed_once_more(
    spec: Specialisation,
    surroundings: Surroundings,
    account: Account,
    step: StepPeaks,
    least_bytes: int,
) -> int:
    """Return a budget for steps like a step whose saved tensors were freed.

    `least_bytes`: enough to compute them again. Plain PyTorch, which frees none, may need less.
    """
    measured = _as_measured(spec, surroundings, account, step)
    least_bytes = min(least_bytes, measured.plain_bytes(spec))
    return max(_needed_budget(spec, measured, now=surroundings).needed_bytes, least_bytes)


def _as_measured(
    spec: Specialisation, surroundings: Surroundings, account: Account, step: StepPeaks | None
) -> ReleasingStep:
    """Return a step with the measured memory of user code, or with the expected."""
    if account.hooks_step:
        surroundings = replace(surroundings, gradients="accumulated")
    returned_bytes = account.since.returned_bytes(account.tally) or 0
    measured_bytes = spec.user_code.measured_bytes
    if step is None:
        expected_bytes = expected_outside_bytes(spec.captured)
        outside_bytes = expected_bytes if measured_bytes is None else measured_bytes
        return ReleasingStep(surroundings.with_outside(outside_bytes), returned_bytes)
    graph = spec.captured.graph
    staying_bytes = max(0, staying_bytes_of(graph, step))
    lives = spec.lives or gradient_lives(graph, surroundings.gradient_bytes, step)
    surroundings = surroundings.with_lives(lives)
    outside_bytes = max(step.outside_bytes, measured_bytes or 0) - staying_bytes
    if lives is not None:
        staying_bytes -= min(staying_bytes, lives.waiting_bytes)
    surroundings = surroundings.with_others(surroundings.others_bytes + staying_bytes)
    return ReleasingStep(surroundings.with_outside(max(0, outside_bytes)), returned_bytes)


def _needed_budget(
    spec: Specialisation,
    step: ReleasingStep,
    limits: Limits = _QUICKLY,
    *,
    now: Surroundings,
    enough_bytes: int = 0,
) -> NeededBudget:
    """Return the least budget found for a step, with alternatives that it has room to compare.

    `now`: memory resident when they are compared. `enough_bytes`: nothing below is searched.
    """
    need = step.least(spec, limits)
    if need.needed_bytes <= enough_bytes:
        return need
    more = _with_more_alternatives(spec, step.surroundings, now)
    if more is None or more.needed_bytes >= need.needed_bytes:
        return need
    if more.needed_bytes <= step.surroundings.budget_bytes:  # which had no room to compare them
        return need
    return NeededBudget(more.task.graph, more.least.plan, more.needed_bytes)


def _later_text(most: str, needed_bytes: int, open_calls: OpenCalls) -> str:
    text = ""
    if most != "this call":
        verb = "needs" if most in _SINGULAR else "need"
        text += (
            f"\n  later     {most} {verb} more than this call: {needed_bytes} bytes "
            f"({format_bytes(needed_bytes)})"
        )
    waiting = open_calls.waiting
    if waiting:
        text += (
            f"\n  waiting   {waiting} of its calls before this one await their backward, "
            "and their saved tensors are kept. If none is to come: torch.no_grad(), or free the "
            f"outputs (del loss). If it is: in_flight={waiting + 1} has each of them leave room "
            "for the others"
        )
    return text


def _forward_text(spec: Specialisation, less: LessExpected) -> str:
    """Return what a call needs whose backward never comes, as text."""
    if not less.may_be_alone:
        return ""
    alone_bytes = with_slack(less.forward_alone_bytes(spec))
    return (
        f"\n  forward   if no backward of this call is to come (torch.no_grad() says so), "
        f"{alone_bytes} bytes ({format_bytes(alone_bytes)}) are expected to be enough"
    )


@dataclass(frozen=True)
class _MoreAlternatives:
    """The least budget that has room to compare more alternatives with their defaults."""

    task: Task  # the step with these alternatives
    least: MinimumBudget  # of that step
    needed_bytes: int  # enough for its least plan, and for the comparisons


def _with_more_alternatives(
    spec: Specialisation, surroundings: Surroundings, now: Surroundings
) -> _MoreAlternatives | None:
    """Return a budget with room to compare the alternatives that this budget has no room for.

    None: there are none.

    `now`: memory resident when they are compared; in a first call the optimizer's state is not.
    """
    graph = spec.captured.larger_budget_graph
    if graph is None:
        return None
    task = surroundings.task(spec.captured.with_graph(graph))
    least = spec.least_budgets.find(task.graph, task.gradients, _QUICKLY)
    held_bytes = now.graph_of(spec.captured).constant_bytes
    comparing = held_bytes + _compared_bytes(spec.captured, graph)
    return _MoreAlternatives(task, least, max(least.found_bytes, comparing))


def _compared_bytes(captured: Captured, wider: Graph) -> int:
    """Return bytes of the largest comparison: inputs of both sides, outputs of the default."""
    taken = [0]
    for op, more, calls in zip(captured.graph.ops, wider.ops, captured.calls, strict=True):
        if len(more.alternatives) == len(op.alternatives):
            continue
        default, values = op.alternatives[0], wider.values
        given = (x for node in set(calls[0].nodes()) for x in flat_outputs(node))
        further = {v for other in more.alternatives for v in other.reads} - set(default.reads)
        workspace = min(variant.workspace_bytes for variant in default.variants)
        sizes = (values[v].size_bytes for v in (*further, *default.writes))
        taken.append(sum(map(storage_bytes, given)) + sum(sizes) + workspace)
    return max(taken)


def _with_more_room(
    error: InfeasibleBudget, spec: Specialisation, less: LessExpected
) -> InfeasibleBudget:
    """Return an error that names a smaller budget with room for more alternatives, if any."""
    more = _with_more_alternatives(spec, less.surroundings, less.present)
    if more is None or more.task.budget_bytes >= more.least.found_bytes:
        return error
    if more.needed_bytes >= (error.minimum_bytes or 0):
        return error
    proven = more.least.lower_bytes > more.task.budget_bytes
    nothing = no_plan(started=time.perf_counter(), proven=proven)
    named = msgspec.structs.replace(more.least, found_bytes=more.needed_bytes)
    return infeasible(more.task, nothing, named)
