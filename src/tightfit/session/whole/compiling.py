"""Chooses the fastest of the compiled plans that were measured to keep to the budget.

A compiler fuses operators and shares buffers, so a compiled plan holds other bytes than the plan
says, mostly fewer, and takes other times. Therefore trial runs decide, also against operators that
run one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from tightfit.alternatives.registry import compilable
from tightfit.capture.captured import Captured
from tightfit.errors import InfeasibleBudget
from tightfit.execution.compiled.program import refuse_uncompilable
from tightfit.execution.lower import lower
from tightfit.execution.runtime import Runner
from tightfit.execution.trial import time_programs
from tightfit.graph.fingerprint import fingerprint
from tightfit.plan.simulate import simulate
from tightfit.planners.base import Task
from tightfit.progress import announce
from tightfit.session.options import Options
from tightfit.session.stages import plan_step
from tightfit.session.whole.compile_trials import CompiledPlan, CompileTrials
from tightfit.session.whole.specialisation import Planned, Specialisation
from tightfit.units import format_bytes

_LITTLE = 0.1  # of the activations' part may stay unused rather than compiling again
_WASTE = 0.01  # of it may be lost to assumptions where nothing is compiled


def fastest_plan(
    spec: Specialisation, task: Task, options: Options, inputs: Sequence[Any], name: str
) -> Planned:
    """Return the plan that was measured to be the fastest within the budget.

    An earlier decision is used again where it fits.

    `task`: the graph with memory resident around the step, the budget, the gradients. `inputs`: the
    tensors of the placeholders, for the trial runs. Raises `InfeasibleBudget` if no plan keeps to
    the budget, compiled or operator by operator. Raises `CompileError` if the step cannot be
    compiled.
    """
    known = _known(spec, task)
    if known is not None:
        return _compiled(task, known)
    refuse_uncompilable(spec.captured)
    full = spec.captured.with_graph(task.graph)
    step = _for_the_compiler(full, options)
    uncompiled = full if options.plan is None else step
    if _compiled_was_slower(spec, task):
        return _one_by_one(spec, uncompiled, task, options, True)
    tried = CompileTrials(step, task, options, inputs, name).run()
    holding = [plan for plan in tried if plan.peak_bytes(task.graph) <= task.budget_bytes]
    try:
        single = _one_by_one(spec, uncompiled, task, options)
    except InfeasibleBudget:
        if not holding:
            raise
        single = None
    if not holding:
        assert single is not None
        announce(
            f"{name}: no compiled plan was measured to hold the budget of "
            f"{format_bytes(task.budget_bytes)}: running operator by operator, where a plan is "
            "exact. A larger budget helps"
        )
        return single
    return _fastest(task, holding, single, inputs, name)


def _for_the_compiler(captured: Captured, options: Options) -> Captured:
    """Return the step with what a compiler takes, unless the user's plan names the whole graph."""
    if options.plan is not None and options.plan.graph == fingerprint(captured.graph):
        return captured
    return compilable(captured)


def _one_by_one(
    spec: Specialisation, captured: Captured, task: Task, options: Options, beats: bool = False
) -> Planned:
    """Return the plan whose operators run one by one."""
    known = spec.known.smallest(task.gradients)
    outcome = plan_step(msgspec.structs.replace(task, graph=captured.graph), options, known)
    assert outcome.plan is not None
    spec.known.remember(outcome.plan)
    runner = Runner(captured, lower(captured, outcome.plan))
    return Planned(captured.graph, outcome, runner, beats_compiled=beats)


def _compiled(task: Task, compiled: CompiledPlan) -> Planned:
    graph = compiled.captured.graph
    graph = msgspec.structs.replace(
        graph, constants_bytes=task.graph.constants_bytes, segments=task.graph.segments
    )
    runner = Runner(compiled.captured, compiled.program)
    return Planned(graph, compiled.outcome, runner, compiled)


def _fastest(
    task: Task,
    holding: Sequence[CompiledPlan],
    single: Planned | None,
    inputs: Sequence[Any],
    name: str,
) -> Planned:
    """Run plans within the budget in turns; return the fastest."""
    programs = [plan.program for plan in holding]
    if single is not None:
        programs.append(single.runner.program)
    times = time_programs(holding[0].captured, programs, inputs, task.gradients)
    best = min(range(len(holding)), key=times.__getitem__)
    if single is None:
        return _compiled(task, holding[best])
    beats = times[-1] < times[best]
    announce(
        f"{name}: measured {times[best] * 1e3:.3g} ms compiled and {times[-1] * 1e3:.3g} ms "
        f"operator by operator: running {'operator by operator' if beats else 'compiled'}"
    )
    if beats:
        return dataclasses.replace(single, beats_compiled=True)
    return _compiled(task, holding[best])


def _known(spec: Specialisation, task: Task) -> CompiledPlan | None:
    """Return a compiled plan made for other surroundings that fits and wastes little."""
    room_bytes = task.budget_bytes - task.graph.constant_bytes
    for planned in spec.plans.values():
        compiled = planned.compiled
        if compiled is None or compiled.gradients != task.gradients:
            continue
        unused = task.budget_bytes - compiled.peak_bytes(task.graph)
        wastes_little = unused <= _LITTLE * room_bytes or compiled.outcome.overhead <= 0
        if unused >= 0 and wastes_little:
            return compiled
    return None


def _compiled_was_slower(spec: Specialisation, task: Task) -> bool:
    """Whether compiled plans were slower in surroundings that leave about as much room."""
    room_bytes = task.budget_bytes - task.graph.constant_bytes
    for planned in spec.plans.values():
        plan = planned.outcome.plan
        if planned.beats_compiled and plan is not None and plan.gradients == task.gradients:
            before_bytes = plan.budget_bytes - planned.graph.constant_bytes
            if abs(room_bytes - before_bytes) <= _LITTLE * room_bytes:
                return True
    return False


def still_fits(
    planned: Planned, budget_bytes: int, *, assumed_bytes: int, outside_bytes: int
) -> bool:
    """Whether a plan has room for the memory of user code between forward and backward.

    Also whether it wastes little. `assumed_bytes`, `outside_bytes`: that memory as assumed and as
    measured.
    """
    assert planned.outcome.plan is not None
    graph = planned.graph.with_outside(outside_bytes)
    if planned.compiled is not None:  # compiling again takes minutes
        return planned.compiled.peak_bytes(graph) <= budget_bytes
    peak_bytes = simulate(graph, planned.outcome.plan).peak_bytes
    little = _WASTE * (planned.outcome.peak_bytes - graph.constant_bytes)
    return peak_bytes <= budget_bytes and assumed_bytes - outside_bytes <= little
