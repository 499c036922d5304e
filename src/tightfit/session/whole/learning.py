"""Measures the steps of a callee, and learns the memory of user code from them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import msgspec

from tightfit.allocator import code_bytes
from tightfit.execution.guard import Guard, StepPeaks
from tightfit.execution.run_state import RunState
from tightfit.execution.runtime import Run
from tightfit.graph.fingerprint import fingerprint
from tightfit.graph.ir import Graph
from tightfit.progress import announce
from tightfit.session.memory.account import Account
from tightfit.session.memory.surroundings import input_bytes
from tightfit.session.options import Options
from tightfit.session.processes import agreed
from tightfit.session.step.gradient_lives import gradient_lives, staying_bytes_of
from tightfit.session.whole.compiling import still_fits
from tightfit.session.whole.specialisation import Planned, Specialisation
from tightfit.torch_private import engine
from tightfit.units import format_bytes

_MOST_FREED = 2  # steps that are not learned from, as memory was freed during them
_LEARNED = 8  # steps of a shape that are learned from; later steps are only checked


class LastStep(msgspec.Struct, frozen=True):
    """The step before, to learn from."""

    planned: Planned
    is_alone: bool  # whether no other call of the callee awaited its backward during it
    more_bytes: int  # held at its begin beyond the bytes its plan was made for
    coming_bytes: int = 0  # the optimizer's state that was still to come
    gradient_bytes: int = 0  # gradients that existed at its begin


class StepMonitor:
    """Measures every step against the budget; figures of the first steps replace assumptions.

    `guard`: measures from the first step on.
    """

    def __init__(self, name: str, account: Account, on_exceed: Literal["raise", "warn"]) -> None:
        self._name = name
        self._account = account
        self._on_exceed: Literal["raise", "warn"] = on_exceed
        self.guard = self._new_guard()
        self._announced = False
        self._learned_from: StepPeaks | None = None
        self._announced_outside: set[int] = set()
        self._freed = 0
        self._is_new = False  # the step that has begun: it is learned from
        # Bytes at the begin of the step before: parameters, gradients and state; state still to
        # come; gradients
        self._lasting_bytes = self._coming_bytes = self._gradient_bytes = 0
        self._steps_begun: WeakKeyDictionary[Specialisation, int] = WeakKeyDictionary()

    def _new_guard(self) -> Guard:
        return Guard(None, self._on_exceed, unmetered_bytes=self._account.before_bytes)

    def begin(
        self,
        spec: Specialisation,
        options: Options,
        inputs: Sequence[Any],
        runs: Iterable[Run],
        last: LastStep | None,
    ) -> None:
        """Begin to measure a step; learn from the previous step.

        `runs`: the calls whose outputs are held, whenever it is iterated over.
        """
        account, captured = self._account, spec.captured
        budget_bytes = options.usable_bytes
        sharing = options.others_in_budget(account)
        if self.guard.device is None:
            if account.held_at_call(inputs, sharing, spec.input_bytes).others_bytes:
                gc.collect()  # memory freed during the first step would hide its bytes
            self.guard.start(str(account.device))
            self.guard.change_budget(budget_bytes)

        def constant_bytes() -> int:
            held = account.held_at_call(inputs, sharing, spec.input_bytes)
            held_bytes = held.gradient_bytes + held.state_bytes + held.others_bytes
            earlier_bytes = input_bytes(captured, held.earlier_inputs)
            return captured.graph.constant_bytes - earlier_bytes + held_bytes

        begun = self._steps_begun.get(spec, 0) + 1
        own_growth_bytes = 0
        self._is_new = begun <= _LEARNED
        if self._is_new:
            self._steps_begun[spec] = begun
            before_bytes, self._lasting_bytes = self._lasting_bytes, account.lasting_bytes()
            own_growth_bytes = self._lasting_bytes - before_bytes
        self.guard.before_forward(
            constant_bytes, budget_bytes, options.shared, runs, is_known=begun > _LEARNED
        )
        held = account.held_at_call(inputs, sharing, spec.input_bytes)
        # with steps in backward, the peak of the backward contains the state
        coming_bytes = held.coming_bytes if options.steps is None else 0
        before_coming_bytes, self._coming_bytes = self._coming_bytes, coming_bytes
        before_gradient_bytes, self._gradient_bytes = self._gradient_bytes, held.gradient_bytes
        if self.guard.steps and last is not None:
            last = msgspec.structs.replace(
                last, coming_bytes=before_coming_bytes, gradient_bytes=before_gradient_bytes
            )
            growth_bytes = self.guard.growth_bytes - own_growth_bytes
            self._learn(spec, options, last, growth_bytes)

    def live_bytes(self) -> int | None:
        """Return the live bytes of the process; None where nothing is measured."""
        meter = self.guard.meter
        return meter.live_bytes() if meter is not None else None

    def after_backward(self, run: Run) -> None:
        """Note that a backward has ended, or failed, or ran without its plan."""
        if run.state in (RunState.FAILED, RunState.DIFFERENTIATED):
            self.guard.abandon()
        else:
            self.guard.after_backward()
            if self._is_new:
                engine.after_this_backward(self.guard.note_ended)

    def forget(self) -> None:
        self.guard = self._new_guard()
        self.learn_again()

    def learn_again(self) -> None:
        """Learn from the next steps as from the first: they are planned differently."""
        self._steps_begun.clear()

    def _learn(
        self, spec: Specialisation, options: Options, before: LastStep, growth_bytes: int
    ) -> None:
        """Learn from the step before; `growth_bytes`: by which other memory has grown since."""
        guard = self.guard
        shared, last = options.shared, before.planned
        alone = before.is_alone and (shared is None or len(shared.members()) <= 1)
        if not self._announced:
            self._announced = True
            self._announce_first_step(last, guard, options)
        step, learned_from = guard.steps[-1], self._learned_from
        self._learned_from = step
        if step is learned_from:
            return  # the step before ran without its plan: this record is of an older step
        if step.others_ran:
            return  # its peaks contain memory of others
        if not (options.arena and self._account.device.type == "cuda"):
            # fillers of an arena there count as allocated: plans leave room for them already
            constant_bytes = step.constant_bytes - before.more_bytes
            if last.graph.constant_bytes >= constant_bytes + before.coming_bytes:
                constant_bytes += before.coming_bytes  # which the plan has counted
            spec.note_backward_peak(last, constant_bytes + step.backward_bytes)
        # along with other calls, memory between forward and backward is theirs, too
        step = _without_cleared(step, self._account.since.cleared_bytes)
        if step.has_freed_between and self._freed < _MOST_FREED:  # garbage of another model, say
            self._freed += 1
            return
        if alone and spec.user_code.is_learning and spec.plans:
            outside_bytes = _held_outside(last.graph, step, growth_bytes)
            if spec.lives is None and options.ranks is None:
                spec.note_lives(gradient_lives(last.graph, before.gradient_bytes, step))
            if spec.lives is not None:
                outside_bytes = max(0, outside_bytes - spec.lives.waiting_bytes)
            has_grown = guard.growth_bytes > 0
            self._learn_outside(spec, options, last, outside_bytes, has_grown=has_grown)

    def _announce_first_step(self, last: Planned, guard: Guard, options: Options) -> None:
        step = guard.steps[-1]
        held = guard.meter.held_bytes() if guard.meter is not None else 0
        code = code_bytes() if self._account.device.type == "cpu" else 0
        libraries = f", {format_bytes(code)} of it files of libraries" * (code > 0)
        announce(
            f"{self._name}: planned peak {format_bytes(last.outcome.peak_bytes)}; forward and "
            f"backward held {format_bytes(step.program_bytes)}, the whole step "
            f"{format_bytes(step.peak_bytes)} of a budget of {format_bytes(options.usable_bytes)}; "
            f"the process holds {format_bytes(held)}{libraries}"
            f"{'' if options.arena else ': the budget bounds tensors, arena=True all of it'}"
        )

    def _learn_outside(
        self,
        spec: Specialisation,
        options: Options,
        last: Planned,
        outside_bytes: int,
        *,
        has_grown: bool,
    ) -> None:
        """Replace assumed bytes of user code by measured bytes; plan again if that matters."""
        outside_bytes = _agreed(spec, options, outside_bytes)
        outside_bytes = spec.user_code.note_measured(outside_bytes, has_grown=has_grown)
        if still_fits(
            last,
            options.usable_bytes,
            assumed_bytes=spec.user_code.planned_bytes,
            outside_bytes=outside_bytes,
        ):
            return
        spec.user_code.plan_for(outside_bytes)
        if outside_bytes not in self._announced_outside:
            self._announced_outside.add(outside_bytes)
            held = format_bytes(outside_bytes) if outside_bytes else "nothing"
            announce(f"user code holds {held} between forward and backward: planning with that")


def _without_cleared(step: StepPeaks, cleared_bytes: int) -> StepPeaks:
    """Return a step as if gradients that were cleared before its backward had stayed."""
    return msgspec.structs.replace(step, entered_bytes=step.entered_bytes + cleared_bytes)


def _held_outside(graph: Graph, step: StepPeaks, growth_bytes: int) -> int:
    """Return the bytes of user code between forward and backward of a step.

    Bytes freed meanwhile are added, as they hid as many. Memory that stays, such as the state of
    another model's optimizer, does not count: it still exists when the next step begins.
    """
    left_bytes = staying_bytes_of(graph, step)
    stays_bytes = min(max(0, left_bytes), max(0, growth_bytes))
    return max(0, step.outside_bytes + max(0, -left_bytes) - stays_bytes)


def _agreed(spec: Specialisation, options: Options, own_bytes: int) -> int:
    """Return the bytes that the first rank measured, or the own if more: ranks then plan alike."""
    key = f"outside bytes {fingerprint(spec.captured.graph)}"
    return max(own_bytes, agreed(options.ranks, key, int, lambda: own_bytes))
