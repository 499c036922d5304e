"""Compiled plans: plan, compile, measure, plan again, until the budget holds by measurement.

A compiler fuses operators and shares buffers, so a compiled plan holds other bytes than the plan
says, mostly fewer. What a trial run is measured to hold decides: the next plan is made for the
budget plus the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tightfit.api.options import Options
from tightfit.api.pipeline import plan_step, with_outside
from tightfit.api.shapes import Planned, Shape
from tightfit.capture.lift import Captured
from tightfit.errors import InfeasibleBudget
from tightfit.execution.compiled import compile_program, refuse_uncompilable
from tightfit.execution.guard import announce
from tightfit.execution.lower import Program, lower
from tightfit.execution.runtime import Runner
from tightfit.execution.trial import TrialPeaks, try_program
from tightfit.graph.ir import Graph
from tightfit.plan.plan import Gradients, Outcome
from tightfit.plan.simulate import simulate
from tightfit.planners.base import Task
from tightfit.units import format_bytes

__all__ = ["CompiledPlan", "compiled_plan", "still_fits"]

MOST_TRIES = 3
_PIECES = 4  # of the backward pass, where gradients are added to those that exist
_WORTH_A_TRY = 0.02  # extra compute, and unused share of the activations' part of the budget
_LITTLE = 0.1  # of the activations' part may stay unused rather than compiling anew
_WASTE = 0.01  # of it may be lost to assumptions where nothing is compiled
_CAUTION = 0.1  # of the difference between plan and measurement is left as a margin


@dataclass(frozen=True)
class CompiledPlan:
    """A plan, its compiled program, and what a trial run of it held.

    Parameters
    ----------
    outcome : Outcome
        The plan. Its peak is what the operators of the plan would hold one by one.
    program : Program
        Compiled.
    trial : TrialPeaks
        Measured.
    """

    outcome: Outcome
    program: Program
    trial: TrialPeaks

    @property
    def gradients(self) -> Gradients:
        """What the plan takes gradients for: fresh or accumulated."""
        assert self.outcome.plan is not None
        return self.outcome.plan.gradients

    def peak_bytes(self, graph: Graph) -> int:
        """Return the measured peak with what a graph says lies around the step."""
        outside = max((s.outside_bytes for s in graph.segments if s.phase == "backward"), default=0)
        return graph.constant_bytes + self.trial.above_constants(outside)


def compiled_plan(
    shape: Shape, task: Task, options: Options, inputs: Sequence[Any], name: str
) -> Planned | None:
    """Return a compiled plan that was measured to hold the budget; None if none of three did.

    Parameters
    ----------
    shape : Shape
        What is known about the step; a plan compiled before serves again where it fits.
    task : Task
        The step's graph with what lies around it, the budget, the gradients.
    options : Options
        What the user asked for.
    inputs : sequence
        The tensors of the placeholders, for the trial runs.
    name : str
        For messages.

    Raises
    ------
    InfeasibleBudget
        If there is not even a plan for operators run one by one.
    CompileError
        If the step cannot be compiled.
    """
    compiled = _known(shape, task)
    if compiled is None:
        refuse_uncompilable(shape.captured)
        compiled = _Tries(shape.captured, task, options, inputs, name).run()
    if compiled is None:
        announce(
            f"{name}: no compiled plan was measured to hold the budget of "
            f"{format_bytes(task.budget_bytes)}: running operator by operator, where a plan is "
            "exact. A larger budget helps"
        )
        return None
    runner = Runner(shape.captured, compiled.program)
    return Planned(task.graph, compiled.outcome, runner, compiled)


def _known(shape: Shape, task: Task) -> CompiledPlan | None:
    """Return a compiled plan made for other surroundings that holds this budget without waste."""
    room_bytes = task.budget_bytes - task.graph.constant_bytes
    for planned in shape.plans.values():
        compiled = planned.compiled
        if compiled is None or compiled.gradients != task.gradients:
            continue
        unused = task.budget_bytes - compiled.peak_bytes(task.graph)
        wastes_little = unused <= _LITTLE * room_bytes or compiled.outcome.overhead <= 0
        if unused >= 0 and wastes_little:
            return compiled
    return None


def still_fits(
    planned: Planned, budget_bytes: int, *, assumed_bytes: int, outside_bytes: int
) -> bool:
    """Whether a plan holds what user code was measured to hold and wastes little on assumptions.

    Parameters
    ----------
    planned : Planned
        The plan of the last step.
    budget_bytes : int
        The limit.
    assumed_bytes, outside_bytes : int
        What user code holds between forward and backward: assumed and measured.
    """
    assert planned.outcome.plan is not None
    graph = with_outside(planned.graph, outside_bytes)
    if planned.compiled is not None:  # compiling anew takes minutes
        return planned.compiled.peak_bytes(graph) <= budget_bytes
    peak_bytes = simulate(graph, planned.outcome.plan).peak_bytes
    little = _WASTE * (planned.outcome.peak_bytes - graph.constant_bytes)
    return peak_bytes <= budget_bytes and assumed_bytes - outside_bytes <= little


class _Tries:
    def __init__(
        self, captured: Captured, task: Task, options: Options, inputs: Sequence[Any], name: str
    ) -> None:
        self.captured = captured
        self.task = task
        self.graph = task.graph
        self.budget_bytes = task.budget_bytes
        self.options = options
        self.inputs = inputs
        self.name = name

    def run(self) -> CompiledPlan | None:
        best: CompiledPlan | None = None
        outcome: Outcome | None = self._first()
        done = set()
        for number in range(1, MOST_TRIES + 1):
            assert outcome is not None and outcome.plan is not None
            done.add(outcome.plan.instructions)
            tried = self._try(outcome, number)
            if tried.peak_bytes(self.graph) <= self.budget_bytes:
                best = tried  # cheaper than those before, or not tried
            outcome = None if self._is_good(tried) else self._next(tried)
            if outcome is None or outcome.plan is None or outcome.plan.instructions in done:
                break
            if best is not None and outcome.overhead >= best.outcome.overhead:
                break
        return best

    def _first(self) -> Outcome:
        """Plan for the budget; the least-memory plan where operators one by one need more."""
        try:
            return self._plan(self.budget_bytes)
        except InfeasibleBudget as error:
            if error.minimum_bytes is None:
                raise
            return self._plan(error.minimum_bytes)

    def _try(self, outcome: Outcome, number: int) -> CompiledPlan:
        assert outcome.plan is not None
        program = lower(self.captured, outcome.plan)
        pieces = 1 if self.task.gradients == "fresh" else _PIECES
        compiled = compile_program(self.captured, program, pieces)
        trial = try_program(self.captured, compiled, self.inputs, self.task.gradients)
        tried = CompiledPlan(outcome, compiled, trial)
        announce(
            f"{self.name}: compiled, try {number} of at most {MOST_TRIES}: measured "
            f"{format_bytes(tried.peak_bytes(self.graph))} of a budget of "
            f"{format_bytes(self.budget_bytes)} (the plan's operators one by one: "
            f"{format_bytes(outcome.peak_bytes)}), extra compute {outcome.overhead:.1%}"
        )
        return tried

    def _is_good(self, tried: CompiledPlan) -> bool:
        """Whether the budget holds and another plan could hardly be faster."""
        room_bytes = max(1, self.budget_bytes - self.graph.constant_bytes)
        unused = (self.budget_bytes - tried.peak_bytes(self.graph)) / room_bytes
        return unused >= 0 and (unused < _WORTH_A_TRY or tried.outcome.overhead < _WORTH_A_TRY)

    def _next(self, tried: CompiledPlan) -> Outcome | None:
        """Plan for the budget plus what the compiled plan held less than planned, or minus it."""
        peak_bytes = tried.peak_bytes(self.graph)
        difference = tried.outcome.peak_bytes - peak_bytes
        margin = round(_CAUTION * abs(self.budget_bytes - peak_bytes))
        try:
            return self._plan(self.budget_bytes + difference - margin)
        except InfeasibleBudget:
            return None

    def _plan(self, budget_bytes: int) -> Outcome:
        return plan_step(self.graph, budget_bytes, self.task.gradients, self.options)
