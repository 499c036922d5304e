"""Compiles and measures plans, one after the other, at most three.

The first plan is searched for the budget. The second is searched for the budget plus the bytes by
which the first stayed below its plan. Where that cannot be faster, the next plan is that of
PyTorch's own partitioner, which counts on fusion; our costs of single operators do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tightfit.capture.captured import Captured
from tightfit.capture.partitioner import min_cut_schedule
from tightfit.errors import BadInput, InfeasibleBudget
from tightfit.execution.compiled.program import compile_program
from tightfit.execution.lower import Program, lower
from tightfit.execution.trial import TrialPeaks, try_program
from tightfit.graph.ir import Graph
from tightfit.plan.assemble import assemble
from tightfit.plan.plan import Gradients, Outcome, Plan
from tightfit.planners.base import Task
from tightfit.planners.outcomes import judged
from tightfit.progress import announce
from tightfit.session.options import Options
from tightfit.session.stages import plan_step
from tightfit.units import format_bytes

MOST_TRIES = 3
_PIECES = 4  # of the backward pass, where gradients are added to those that exist
_NO_EXTRA = 0.001  # of compute: another plan would not be faster
_USED_UP = 0.005  # of the activations' part of the budget: another plan would not keep more
_CAUTION = 0.1  # of the difference between plan and measurement is left as a margin
_UNLIMITED = 1 << 60
_SHARES = (1.0, 0.75, 0.5, 0.25)  # of the bytes that the partitioner saves


@dataclass(frozen=True)
class CompiledPlan:
    """A plan, its compiled program, and the measured peaks of a trial run."""

    captured: Captured  # the step with the graph that was planned
    outcome: Outcome  # its peak is that of operators that run one by one
    program: Program  # compiled
    trial: TrialPeaks  # measured

    @property
    def gradients(self) -> Gradients:
        return _plan_of(self.outcome).gradients

    def peak_bytes(self, graph: Graph) -> int:
        """Return the measured peak with the memory resident around the step of a graph."""
        outside = max((s.outside_bytes for s in graph.segments if s.phase == "backward"), default=0)
        return graph.constant_bytes + self.trial.above_constants(outside)


@dataclass
class CompileTrials:
    """Compiles plans of a step and measures them.

    `task`: the budget and the gradients. `inputs`: the tensors of the placeholders, for the trial
    runs.
    """

    captured: Captured
    task: Task
    options: Options
    inputs: Sequence[Any]
    name: str
    tried: list[CompiledPlan] = field(default_factory=list, init=False)

    def run(self) -> list[CompiledPlan]:
        """Return the plans that were compiled and measured, also those that exceed the budget.

        Raises `InfeasibleBudget` if no plan of single operators exists. Raises `CompileError` if
        the step cannot be compiled.
        """
        outcome: Outcome | None = self._first()
        while outcome is not None and len(self.tried) < MOST_TRIES:
            self.tried.append(self._try(outcome))
            outcome = self._next()
        return self.tried

    def _first(self) -> Outcome:
        """Plan for the budget, or for the least budget where operators one by one need more."""
        try:
            return self._plan(self.task.budget_bytes)
        except InfeasibleBudget as error:
            if error.minimum_bytes is None:
                raise
            return self._plan(error.minimum_bytes)

    def _try(self, outcome: Outcome) -> CompiledPlan:
        program = lower(self.captured, _plan_of(outcome))
        pieces = 1 if self.task.gradients == "fresh" else _PIECES
        compiled = compile_program(self.captured, program, pieces)
        trial = try_program(self.captured, compiled, self.inputs, self.task.gradients)
        tried = CompiledPlan(self.captured, outcome, compiled, trial)
        kept = f" {outcome.note}," if outcome.note else ""
        announce(
            f"{self.name}: compiled, try {len(self.tried) + 1} of at most {MOST_TRIES}:{kept} "
            f"measured {format_bytes(self._peak_bytes(tried))} of a budget of "
            f"{format_bytes(self.task.budget_bytes)} (the plan's operators one by one: "
            f"{format_bytes(outcome.peak_bytes)}), extra compute {outcome.overhead:.1%}"
        )
        return tried

    def _next(self) -> Outcome | None:
        """Return a plan to try next; None where another plan could hardly be faster."""
        last = self.tried[-1]
        if last.outcome.bound_source == "given":
            return None
        holding = [t.outcome.overhead for t in self.tried if self._unused_share(t) >= 0]
        if holding and min(holding) < _NO_EXTRA:
            return None
        if not 0 <= self._unused_share(last) < _USED_UP:
            corrected = self._corrected(last)
            least = min(holding, default=math.inf)
            if corrected is not None and corrected.overhead < least and self._is_new(corrected):
                return corrected
        return self._partitioned(last)

    def _corrected(self, last: CompiledPlan) -> Outcome | None:
        """Plan for the budget plus the bytes that the last plan held less than planned, or minus.

        Where a plan of that size has exceeded the budget, plan for the middle between both.
        """
        peak_bytes = self._peak_bytes(last)
        margin = round(_CAUTION * abs(self.task.budget_bytes - peak_bytes))
        aim_bytes = self.task.budget_bytes + last.outcome.peak_bytes - peak_bytes - margin
        too_large = [t.outcome.peak_bytes for t in self.tried if self._unused_share(t) < 0]
        if self._unused_share(last) >= 0 and too_large and aim_bytes >= min(too_large):
            aim_bytes = (last.outcome.peak_bytes + min(too_large)) // 2
        try:
            return self._plan(aim_bytes)
        except InfeasibleBudget:
            return None

    def _partitioned(self, last: CompiledPlan) -> Outcome | None:
        """Return the partitioner's choice at the largest share that seems to fit."""
        difference = last.outcome.peak_bytes - self._peak_bytes(last)
        for share in _SHARES:
            try:
                schedule = min_cut_schedule(self.captured, share)
            except BadInput:  # it would compute an op again that must not be
                return None
            plan = assemble(
                self.captured.graph,
                schedule.computes,
                budget_bytes=_UNLIMITED,
                gradients=self.task.gradients,
            )
            outcome = judged(self._task(_UNLIMITED), plan)
            if outcome.peak_bytes - difference <= self.task.budget_bytes:
                outcome = msgspec.structs.replace(outcome, note=f"as {schedule.setting} saves")
                return outcome if self._is_new(outcome) else None
        return None

    def _plan(self, budget_bytes: int) -> Outcome:
        return plan_step(self._task(budget_bytes), self.options)

    def _task(self, budget_bytes: int) -> Task:
        return msgspec.structs.replace(
            self.task, graph=self.captured.graph, budget_bytes=budget_bytes
        )

    def _is_new(self, outcome: Outcome) -> bool:
        instructions = _plan_of(outcome).instructions
        return all(_plan_of(t.outcome).instructions != instructions for t in self.tried)

    def _peak_bytes(self, tried: CompiledPlan) -> int:
        return tried.peak_bytes(self.task.graph)

    def _unused_share(self, tried: CompiledPlan) -> float:
        """Return the unused part of the budget for activations; below 0 if it is exceeded."""
        budget_bytes = self.task.budget_bytes
        room_bytes = max(1, budget_bytes - self.task.graph.constant_bytes)
        return (budget_bytes - self._peak_bytes(tried)) / room_bytes


def _plan_of(outcome: Outcome) -> Plan:
    assert outcome.plan is not None
    return outcome.plan
