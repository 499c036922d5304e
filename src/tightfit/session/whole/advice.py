"""The advised budget where the given is too small: it holds for the steps to come, too."""

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
    handed_out_bytes,
    kept_by_loss_bytes,
    with_numbers,
)
from tightfit.session.options import Options
from tightfit.session.whole.optimistic import LessExpected, Need, Passing
from tightfit.session.whole.specialisation import Specialisation
from tightfit.units import format_bytes

_QUICKLY = Limits(seconds=2.0)
_ESTIMATED = 64  # of what several calls need, this part may be missing


@dataclass(frozen=True)
class OpenCalls:
    """The other calls that are open at the same time as a call."""

    waiting: int  # calls of the same callable before it that await their backward
    least_bytes: int = 0  # kept by calls to come, at least
    own_bytes: int = 0  # with which room is left for a call that keeps least
    company_bytes: int = 0  # a size with room for all calls of the step, where others share it
    spare_bytes: int = 0  # kept by calls that wait beyond what they must keep

    @property
    def is_alone(self) -> bool:
        return not (self.waiting or self.least_bytes or self.company_bytes)


def advised(
    error: InfeasibleBudget,
    spec: Specialisation,
    less: LessExpected,
    account: Account,
    options: Options,
    open_calls: OpenCalls,
) -> InfeasibleBudget:
    """Return an error that names a budget which holds for further steps of the same kind.

    Memory held at an instant counts at that instant: outputs of a forward until the next has ended,
    gradients that an optimizer has used until the backward. Where no optimizer has stepped yet,
    calls may add to gradients before it does.

    `error`: names the least budget of the call that was asked for. `less`: memory resident around
    it. `open_calls`: its other calls that are open at the same time.
    """
    loop = _Loop(spec, less, account, open_calls)
    this_call, held_bytes = None, less.held_bytes
    if open_calls.is_alone:
        seconds = max(_QUICKLY.seconds, options.limits.seconds / 2)  # the loop has stopped
        limits = msgspec.structs.replace(options.limits, seconds=seconds)
        this_call = _need(spec, loop.each, limits, now=less.unseen)
        call_bytes, held_bytes = this_call.needed_bytes, less.held_by(loop.each)
    else:
        error = _with_more_room(error, spec, less)
        call_bytes = error.minimum_bytes or 0
    needed = loop.needed_bytes(call_bytes)
    if max(needed.values()) <= options.planned_bytes:  # within which calls have kept more
        as_kept = replace(loop, open_calls=replace(open_calls, spare_bytes=0))
        needed = as_kept.needed_bytes(call_bytes)
    most = max(needed, key=needed.__getitem__)
    needed_bytes = needed[most] + options.reserve_bytes
    text, proven = str(error), error.proven
    if isinstance(error, NoPlan):
        least, proven_bytes = error.least, less.proven_bytes(spec)
        if this_call is None:
            this_call = Need(error.task.graph, least.plan, least.found_bytes)
        named = this_call.graph, this_call.plan, this_call.needed_bytes
        expected = Expected(*named, held_bytes, proven_bytes, needed_bytes)
        text = infeasible_message(error.task, error.outcome, least, expected)
        if proven_bytes is not None:
            proven = proven and proven_bytes > options.planned_bytes
    text += _in_words(most, needed_bytes, open_calls) + _alone_in_words(spec, less)
    return InfeasibleBudget(
        text,
        budget_bytes=error.budget_bytes,
        minimum_bytes=needed_bytes,
        proven=proven,
        call_bytes=error.minimum_bytes,
    )


_ONE = ("the optimizer's step", "code between steps")


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
        """Those of them that are not held yet: no call has ended."""
        if self.account.since.returned_bytes(self.account.tally) is not None:
            return 0
        return handed_out_bytes(self.spec.captured) + kept_by_loss_bytes(self.spec.captured)

    @cached_property
    def _new_gradient_bytes(self) -> int:
        return self.account.new_gradient_bytes() + self.less.used_gradient_bytes

    @cached_property
    def each(self) -> Passing:
        """A call, with all memory that is likely to be there then."""
        coming = self.less.likely_to_come()
        passing_bytes = max(coming.passing_bytes, self._returned_bytes)
        return replace(coming, passing_bytes=passing_bytes)

    def needed_bytes(self, call_bytes: int) -> dict[str, int]:
        """Return the budgets by what needs them; `call_bytes`: that of the call by itself."""
        step_bytes, rise_bytes = self._step_bytes, self.account.between.rise_bytes
        every = {"this call": call_bytes, "the optimizer's step": step_bytes}
        if rise_bytes:
            passing_bytes = self.account.optimizers.passing_bytes()
            every["code between steps"] = step_bytes - passing_bytes + rise_bytes
        calls = self.open_calls
        if calls.company_bytes:
            every["calls within the same budget"] = calls.company_bytes + self._coming_bytes
        elif calls.waiting:
            every["calls that await their backward"] = self._waiting_bytes
        every = {holder: size - calls.spare_bytes for holder, size in every.items()}
        needed = {holder: with_numbers(size) for holder, size in every.items()}
        if not self.account.since.has_stepped:
            needed["calls that add to gradients"] = self._adding_bytes(max(every.values()))
        if calls.waiting:  # what others need is estimated, not searched
            needed = {holder: size + size // _ESTIMATED for holder, size in needed.items()}
        return needed

    @cached_property
    def _waiting_bytes(self) -> int:
        """Bytes with which a first call leaves room for those that wait along with it."""
        around_bytes = self.less.around.around(self.spec.captured).constant_bytes
        new_bytes = self.account.new_gradient_bytes()
        return around_bytes + new_bytes + self.open_calls.least_bytes + self.open_calls.own_bytes

    @cached_property
    def _step_bytes(self) -> int:
        """Bytes held while the optimizer steps."""
        graph = self.each.around.around(self.spec.captured)
        new_bytes = self._new_gradient_bytes + self._returned_bytes
        return graph.constant_bytes + new_bytes + self.account.optimizers.passing_bytes()

    def _adding_bytes(self, enough_bytes: int) -> int:
        """Return the budget of calls that add to gradients; `enough_bytes`: others need it."""
        adding = replace(self.each.around, gradients="accumulated")
        gradient_bytes = adding.gradient_bytes + self._new_gradient_bytes
        step = replace(self.each, around=replace(adding, gradient_bytes=gradient_bytes))
        now = self.less.unseen
        needed_bytes = _need(self.spec, step, now=now, enough_bytes=enough_bytes).needed_bytes
        needed_bytes += self.open_calls.least_bytes - self.open_calls.spare_bytes
        needed_bytes = with_numbers(needed_bytes)
        if not self.open_calls.is_alone:
            return needed_bytes
        # not seen yet: no more than plain PyTorch takes without them
        plain_bytes = max(self.each.plain_bytes(self.spec), self._step_bytes)
        return min(needed_bytes, plain_bytes)


def needed_by_steps(
    spec: Specialisation, around: Surroundings, account: Account, step: StepPeaks | None
) -> int:
    """Return the least budget for steps like the last, the optimizer's own left out.

    `around`: memory resident around it, with all expected memory. `step`: its peaks; None: its
    backward has not begun.
    """
    need = _need(spec, _as_measured(spec, around, account, step), now=around)
    return with_numbers(need.needed_bytes)


def needed_once_more(
    spec: Specialisation,
    around: Surroundings,
    account: Account,
    step: StepPeaks,
    least_bytes: int,
) -> int:
    """Return a budget for steps like one whose saved tensors were freed, to be made again.

    `least_bytes`: that this takes. Plain PyTorch may need less, where nothing is freed.
    """
    measured = _as_measured(spec, around, account, step)
    least_bytes = min(least_bytes, measured.plain_bytes(spec))
    return max(_need(spec, measured, now=around).needed_bytes, least_bytes)


def _as_measured(
    spec: Specialisation, around: Surroundings, account: Account, step: StepPeaks | None
) -> Passing:
    """Return a step with memory of user code as it was measured, or as it is expected."""
    returned_bytes = account.since.returned_bytes(account.tally) or 0
    seen_bytes = spec.user_code.seen_bytes
    if step is None:
        expected_bytes = expected_outside_bytes(spec.captured)
        outside_bytes = expected_bytes if seen_bytes is None else seen_bytes
        return Passing(around.with_outside(outside_bytes), returned_bytes)
    tangents = (v.size_bytes for v in spec.captured.graph.values if v.role == "tangent")
    staying_bytes = max(0, step.left_bytes - sum(tangents))  # until the backward has ended
    outside_bytes = max(step.outside_bytes, seen_bytes or 0) - staying_bytes
    around = around.with_others(around.others_bytes + staying_bytes)
    return Passing(around.with_outside(max(0, outside_bytes)), returned_bytes)


def _need(
    spec: Specialisation,
    passing: Passing,
    limits: Limits = _QUICKLY,
    *,
    now: Surroundings,
    enough_bytes: int = 0,
) -> Need:
    """Return the least budget that was found for a step, with ways that it has room to compare.

    `now`: memory resident when they are compared. `enough_bytes`: a budget that need not be
    smaller.
    """
    need = passing.least(spec, limits)
    if need.needed_bytes <= enough_bytes:
        return need
    more = _with_more_ways(spec, passing.around, now)
    if more is None or more.named_bytes >= need.needed_bytes:
        return need
    if more.named_bytes <= passing.around.budget_bytes:  # which had no room to compare them
        return need
    return Need(more.task.graph, more.least.plan, more.named_bytes)


def _in_words(most: str, needed_bytes: int, open_calls: OpenCalls) -> str:
    """Return the advice as text to add to an error."""
    text = ""
    if most != "this call":
        verb = "needs" if most in _ONE else "need"
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


def _alone_in_words(spec: Specialisation, less: LessExpected) -> str:
    """Say what a call needs whose backward never comes."""
    if not less.may_be_alone:
        return ""
    alone_bytes = with_numbers(less.forward_alone_bytes(spec))
    return (
        f"\n  forward   if no backward of this call is to come (torch.no_grad() says so), "
        f"{alone_bytes} bytes ({format_bytes(alone_bytes)}) are expected to be enough"
    )


@dataclass(frozen=True)
class _More:
    """The least budget that has room to compare more ways with their defaults."""

    task: Task  # the step with those ways
    least: MinimumBudget  # of that step
    named_bytes: int  # enough for its least plan, and for the comparisons


def _with_more_ways(spec: Specialisation, around: Surroundings, now: Surroundings) -> _More | None:
    """Return a larger budget that has room to compare the alternatives that this budget has not;
    None: no such.

    `now`: memory resident when they are compared: in a first call the optimizer's state is not.
    """
    beyond = spec.captured.beyond
    if beyond is None:
        return None
    task = around.task(spec.captured.with_graph(beyond))
    least = spec.least_budgets.find(task.graph, task.gradients, _QUICKLY)
    held_bytes = now.around(spec.captured).constant_bytes
    comparing = held_bytes + _compared_bytes(spec.captured, beyond)
    return _More(task, least, max(least.found_bytes, comparing))


def _compared_bytes(captured: Captured, beyond: Graph) -> int:
    """Return bytes of the largest comparison: inputs of both ways, outputs of the default."""
    taken = [0]
    for op, more, calls in zip(captured.graph.ops, beyond.ops, captured.calls, strict=True):
        if len(more.alternatives) == len(op.alternatives):
            continue
        default, values = op.alternatives[0], beyond.values
        given = (x for node in set(calls[0].nodes()) for x in flat_outputs(node))
        further = {v for way in more.alternatives for v in way.reads} - set(default.reads)
        workspace = min(variant.workspace_bytes for variant in default.variants)
        sizes = (values[v].size_bytes for v in (*further, *default.writes))
        taken.append(sum(map(storage_bytes, given)) + sum(sizes) + workspace)
    return max(taken)


def _with_more_room(
    error: InfeasibleBudget, spec: Specialisation, less: LessExpected
) -> InfeasibleBudget:
    """Return an error that names a smaller budget with room for more ways, if there is any."""
    more = _with_more_ways(spec, less.around, less.unseen)
    if more is None or more.task.budget_bytes >= more.least.found_bytes:
        return error
    if more.named_bytes >= (error.minimum_bytes or 0):
        return error
    proven = more.least.lower_bytes > more.task.budget_bytes
    nothing = no_plan(started=time.perf_counter(), proven=proven)
    named = msgspec.structs.replace(more.least, found_bytes=more.named_bytes)
    return infeasible(more.task, nothing, named)
