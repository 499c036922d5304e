"""The plan of a step for the current constants: at once for a further shape, better plans later."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from tightfit.errors import CompileError, TightfitError
from tightfit.execution.far.step import moving_program
from tightfit.execution.lower import lower
from tightfit.execution.runtime import Runner
from tightfit.graph.fingerprint import fingerprint
from tightfit.graph.ir import Graph
from tightfit.plan.assemble import everything_kept, handing_over_singly
from tightfit.plan.plan import Gradients, Outcome, Plan
from tightfit.plan.simulate import simulate
from tightfit.plan.verify import verify
from tightfit.planners.background import Search
from tightfit.planners.base import Limits, Task
from tightfit.planners.outcomes import judged, valid_outcomes
from tightfit.planners.questions.minimum import MinimumBudget
from tightfit.planners.registry import DEFAULT
from tightfit.progress import Progress, announce
from tightfit.session.memory.surroundings import Surroundings, handed_out_bytes
from tightfit.session.options import Options
from tightfit.session.processes import agreed
from tightfit.session.stages import cached_outcome, key_of, plan_at_once, plan_step
from tightfit.session.step.holding import forward_peak_bytes
from tightfit.session.step.presumed import KeptRange
from tightfit.session.whole.compiling import fastest_plan
from tightfit.session.whole.earlier import earlier_plan, store_least_plan, store_plan
from tightfit.session.whole.optimistic import with_more_room
from tightfit.session.whole.specialisation import Moves, Planned, Specialisation

_QUICKLY = Limits(seconds=1.0)
_AT_ONCE = Limits(seconds=0.15)
_MOST_OPS_AT_ONCE = 2500  # of a step for which a smaller budget is found in a moment
_MOST_TIGHTENED = 4  # smaller budgets that are tried for a plan at once
_ANY_GAP = 1e3  # of overhead: more than any plan has
_WORTH_A_WORD = 0.001  # of overhead that a plan saves
_GOOD_ENOUGH = 0.1  # of overhead, for the few seconds until a search has found a better plan


class NeedsComparing(Exception):
    """No known plan fits, and alternatives of the step are still to be compared."""


@dataclass(frozen=True)
class PlanRequest:
    """The call that a plan is for, and how much effort it is worth.

    `inputs`: the tensors of the placeholders, for trial runs of compiled plans. `others`: returns
    plans of the same callable at other shapes. `waits`: whether to search now and not in the
    background, before training. `least`: whether to begin with the known plan that holds least.
    `once`: whether the plan is for this call alone: no better plan is searched. `instead`: asked
    for a plan before the step waits for a search; returns None if it is to wait.
    """

    inputs: Sequence[Any]
    options: Options
    name: str
    others: Callable[[], Iterable[Plan]]
    waits: bool = False
    least: bool = False
    once: bool = False
    instead: Callable[[], Planned | None] = lambda: None


def planned_for(spec: Specialisation, around: Surroundings, request: PlanRequest) -> Planned:
    """Return a plan for the constants of now, ready to run; make it if needed.

    No step waits for a search: it runs the best known plan, and takes a better plan between two
    steps once a search in the background has found it. Only where no known plan fits, a plan is
    searched at once. A compiled plan is tried on the inputs and waited for.

    `around`: memory resident around it now. Raises `NeedsComparing` if a plan may need
    alternatives that were left for later.
    """
    options, name = request.options, request.name
    around = spec.seen_around(around)
    planned = spec.fitting(around)
    if planned is None and request.least and not request.waits and options.plan is None:
        planned = _least_planned(spec, around, options)
    if planned is None and options.compile:
        planned = spec.take(around, _compiled(spec, around.task(spec.captured), request))
    elif planned is None:
        planned = _first_planned(spec, around, request)
    elif not options.compile and spec.may_gain(around, planned):
        _search(spec, around, around.task(spec.captured), options)
    ended = spec.ended_search(around)
    return planned if ended is None else _better(spec, *ended, planned, options, name)


def _compiled(spec: Specialisation, task: Task, request: PlanRequest) -> Planned:
    """Return the fastest plan within the budget, compiled or not."""
    if request.options.ranks is not None:
        raise CompileError(
            f"{request.name} runs under DistributedDataParallel, where every process must run the "
            "same plan, but each compiles and measures its own. Way out: compile=False"
        )
    return fastest_plan(spec, task, request.options, request.inputs, request.name)


def _first_planned(spec: Specialisation, around: Surroundings, request: PlanRequest) -> Planned:
    """Return the first plan for some surroundings, made at once where that can be."""
    options = request.options
    task = around.task(spec.captured)
    at_hand = (*spec.known.all(), *request.others())
    outcome = None
    if request.waits and spec.postponed is not None:
        raise NeedsComparing
    if options.ranks is None and not request.waits and options.planner == DEFAULT:
        planned = _for_more_growth(spec, around, options, at_hand, once=request.once)
        if planned is not None:
            return planned
        outcome = _leaving_room(spec, around, options, at_hand, once=request.once)
    if outcome is None:
        outcome = _outcome_at_once(spec, around, task, at_hand, request)
    if outcome is None:
        instead = request.instead()
        if instead is not None:
            return instead
        outcome = _any_outcome(spec, around, task, request)
    return spec.take(around, _lowered(spec, task.graph, outcome, options))


def planned_at_once(
    spec: Specialisation, around: Surroundings, options: Options, passing_bytes: int
) -> Planned | None:
    """Return the best known plan, or a plan that is found at once; None: none fits.

    A better plan is searched in the background. `passing_bytes`: held in its forward in addition.
    Where a plan leaves no room for that, another is made for a smaller budget.
    """
    task = around.task(spec.captured)
    kept = everything_kept(task.graph, task.gradients)
    over_bytes = 0
    for _ in range(_MOST_TIGHTENED):
        around = dataclasses.replace(around, budget_bytes=around.budget_bytes - over_bytes)
        own = around.task(spec.captured)
        outcome, is_final = _quick_outcome(spec, own, options, (kept, *spec.known.all()))
        if outcome is None:
            return None
        assert outcome.plan is not None
        forward_bytes = forward_peak_bytes(own.graph, outcome.plan)
        over_bytes = forward_bytes + passing_bytes - task.budget_bytes
        if over_bytes <= 0:
            if not is_final:
                _search(spec, around, own, options)
            return spec.take(around, _lowered(spec, own.graph, outcome, options))
    return None


def planned_meanwhile(
    spec: Specialisation, around: Surroundings, plan: Plan, options: Options
) -> Planned | None:
    """Return a step that runs by a given plan until a search has found a better; None: invalid.

    See `planned_as`.
    """
    planned = planned_as(spec, around, plan, options)
    if planned is None:
        return None
    _search(spec, around, around.task(spec.captured), options)
    return spec.take(around, planned)


def improved(spec: Specialisation, planned: Planned, request: PlanRequest) -> Planned:
    """Return what a search for the surroundings of a plan has found, if better; else that plan."""
    made_for = next((around for around, known in spec.plans.items() if known is planned), None)
    ended = None if made_for is None else spec.ended_search(made_for)
    if ended is None:
        return planned
    return _better(spec, *ended, planned, request.options, request.name)


def planned_as(
    spec: Specialisation, around: Surroundings, plan: Plan, options: Options
) -> Planned | None:
    """Return a plan of a step ready to run; None: invalid, or with alternatives not compared."""
    task = around.task(spec.captured)
    if spec.postponed is not None:
        return None
    found = valid_outcomes(task, (msgspec.structs.replace(plan, graph=fingerprint(task.graph)),))
    return _lowered(spec, task.graph, found[0], options) if found else None


def _least_planned(spec: Specialisation, around: Surroundings, options: Options) -> Planned | None:
    """Return the known plan that keeps least for its backward, or that holds least, if it fits."""
    task = around.task(spec.captured)
    thrifty = spec.known.thrifty(task.gradients)
    found = valid_outcomes(task, (thrifty,) if thrifty is not None else ())
    found = found or valid_outcomes(task, spec.known.all())
    if not found:
        return None
    outcome = min(found, key=lambda outcome: outcome.peak_bytes)
    planned = _lowered(spec, task.graph, outcome, options)
    if options.compile:  # a plan that runs once is not worth it, and would stay
        return planned
    # as if there were no more room, so that a better plan is looked for where there is
    own = dataclasses.replace(around, budget_bytes=outcome.peak_bytes)
    return spec.take(own, planned)


def _for_more_growth(
    spec: Specialisation,
    around: Surroundings,
    options: Options,
    at_hand: Sequence[Plan],
    *,
    once: bool,
) -> Planned | None:
    """Return a plan with room to grow as much again as was seen; None: no growth, or none fits.

    Memory that grows from step to step, as the history of LBFGS does, would need a new plan each
    time.
    """
    grown_bytes = spec.grown_bytes(around)
    if grown_bytes == 0 or options.plan is not None:
        return None
    later = around.with_others(around.others_bytes + grown_bytes)
    task = later.task(spec.captured)
    outcome, is_final = _quick_outcome(spec, task, options, at_hand)
    if outcome is None:
        return None
    if not is_final and not once:
        _search(spec, later, task, options)
    return spec.take(later, _lowered(spec, task.graph, outcome, options))


def _leaving_room(
    spec: Specialisation,
    around: Surroundings,
    options: Options,
    at_hand: Sequence[Plan],
    *,
    once: bool,
) -> Outcome | None:
    """Return a first plan with room for as much user code as can be, if there is any.

    A loop may hold the outputs before while this forward runs. It may also hold as much of what it
    makes between forward and backward until that has ended.
    """
    handed_out = handed_out_bytes(spec.captured)
    has_run = spec.plans or spec.user_code.is_known
    if has_run or options.plan is not None or handed_out <= around.others_bytes:
        return None
    tasks = (each.task(spec.captured) for each in with_more_room(spec, around))
    outcomes = (_quick_outcome(spec, task, options, at_hand) for task in tasks)
    found, is_final = next((each for each in outcomes if each[0] is not None), (None, False))
    if found is None or found.plan is None:
        if spec.postponed is not None:
            raise NeedsComparing
        return None
    task = around.task(spec.captured)
    if not is_final and not once:
        _search(spec, around, task, options)
    plan = msgspec.structs.replace(found.plan, graph=fingerprint(task.graph))
    return next(iter(valid_outcomes(task, (plan,))), None)


def _outcome_at_once(
    spec: Specialisation,
    around: Surroundings,
    task: Task,
    at_hand: Sequence[Plan],
    request: PlanRequest,
) -> Outcome | None:
    """Return a plan to start with: the best known plan while a search goes on; None: none fits.

    Where the user waits for a search, the plan that it finds.
    """
    options = request.options
    asked = request.waits or options.planner != DEFAULT
    if asked and not spec.is_further:
        return _searching(spec, task, options)(options.progress)
    outcome, is_final = agreed(
        options.ranks,
        f"quick plan {key_of(task, options)}",
        tuple[Outcome | None, bool],
        lambda: _quick_outcome(spec, task, options, at_hand),
    )
    if outcome is None and spec.postponed is not None:
        raise NeedsComparing
    if outcome is not None and not is_final and not request.once:
        _search(spec, around, task, options)
    return outcome


def _any_outcome(
    spec: Specialisation, around: Surroundings, task: Task, request: PlanRequest
) -> Outcome:
    """Search until there is a plan, at any cost: a step waits for it, not for a better plan."""
    options = request.options
    if spec.is_further:
        announce(f"{request.name}: no known plan fits the new inputs; searching one")
    limits = msgspec.structs.replace(options.limits, gap=_ANY_GAP)
    first = _searching(spec, task, dataclasses.replace(options, limits=limits))(options.progress)
    assert first.plan is not None
    if not request.once:
        _search(spec, around, task, options)
    return judged(task, first.plan)


def _search(spec: Specialisation, around: Surroundings, task: Task, options: Options) -> None:
    spec.search(around, _searching(spec, task, options, apart=True))


def _searching(
    spec: Specialisation, task: Task, options: Options, *, apart: bool = False
) -> Callable[[Progress], Outcome]:
    """Return the full search, here or apart; it holds neither the model nor its optimizer."""
    known = spec.known.smallest(task.gradients)
    options = dataclasses.replace(options, optimizer=None, shared=None, steps=None)

    def search(progress: Progress) -> Outcome:
        own = dataclasses.replace(options, progress=progress)
        return plan_step(task, own, known, apart=apart)

    return search


def _quick_outcome(
    spec: Specialisation, task: Task, options: Options, others: Iterable[Plan]
) -> tuple[Outcome | None, bool]:
    """Return the best plan that is known in about a second.

    Candidates are the plan that an earlier process kept and plans of this and other shapes, each
    verified on this graph. Plans that were searched before the costs of the step were learned are
    good enough. Where there are none, the default planner adds plans that it finds at once.

    Returns None in place of a plan if none fits, and whether there is nothing to search: the plan
    is optimal, or the result of a search.
    """
    known = cached_outcome(task, options)
    if known is not None:
        return known, True
    own = fingerprint(task.graph)
    found = valid_outcomes(task, (msgspec.structs.replace(plan, graph=own) for plan in others))
    best = min(found, key=lambda outcome: outcome.overhead, default=None)
    if best is not None and (spec.known.has_retired or best.overhead < _GOOD_ENOUGH):
        return best, best.status == "optimal"
    quick = plan_at_once(task, options)
    if quick.plan is None or (best is not None and best.overhead <= quick.overhead):
        return best, False
    return quick, quick.status == "optimal"


def _better(
    spec: Specialisation,
    made_for: Surroundings,
    search: Search[Outcome],
    before: Planned,
    options: Options,
    name: str,
) -> Planned:
    """Return the plan a search has found, or the known plan if that costs less."""
    try:
        outcome = search.result()
    except TightfitError as error:
        announce(f"{name}: the search for a better plan ended without one: {error}")
        return before
    if outcome is None or outcome.overhead > before.outcome.overhead:
        return before
    if before.outcome.overhead - outcome.overhead > _WORTH_A_WORD:
        announce(
            f"{name}: a better plan was found, overhead {outcome.overhead:+.1%} instead "
            f"of {before.outcome.overhead:+.1%}"
        )
    graph = made_for.around(spec.captured)
    return spec.take(made_for, _lowered(spec, graph, outcome, options))


def _lowered(spec: Specialisation, graph: Graph, outcome: Outcome, options: Options) -> Planned:
    assert outcome.plan is not None
    if options.ranks is not None:  # another rank has made it; all send gradients early
        plan = handing_over_singly(graph, outcome.plan)
        verify(plan, graph)
        outcome = msgspec.structs.replace(outcome, plan=plan)
    spec.known.remember(outcome.plan)
    store_plan(spec.captured.graph, "last" if spec.plans else "first", outcome, options)
    clock = spec.tuner.clock if spec.tuner is not None else None
    program = lower(spec.captured, outcome.plan, clock=clock)
    if outcome.plan.far is None:
        return Planned(graph, outcome, Runner(spec.captured, program))
    assert options.far_memory is not None
    moves = Moves()
    begin = partial(options.far_memory.begin_step, spec.captured.joint.device)
    program = moving_program(program, begin, moves.ended)
    return Planned(graph, outcome, Runner(spec.captured, program), moves=moves)


def smallest_budget(spec: Specialisation, around: Surroundings, options: Options) -> MinimumBudget:
    """Find the smallest budget with a plan; the plan is kept in mind.

    Alternatives that are still to be compared count as if they were as exact as promised.
    """
    graph = around.around(spec.hoped)
    least = spec.least_budgets.find(graph, around.gradients, options.limits, options.progress)
    if spec.postponed is None:
        spec.known.remember(least.plan)
    store_least_plan(spec.hoped.graph, "least", least, options)
    return least


def quick_range(
    spec: Specialisation,
    around: Surroundings,
    options: Options,
    new_gradient_bytes: int,
    limits: Limits = _QUICKLY,
) -> KeptRange:
    """Return the bytes that plans of a step may keep, found while the step waits."""
    least = smallest_budget(spec, around, dataclasses.replace(options, limits=limits))
    graph = around.around(spec.hoped)
    # as if so much came between forward and backward that kept bytes decide
    crowded = graph.with_outside(least.found_bytes - graph.constant_bytes)
    thrifty = spec.least_budgets.find(crowded, around.gradients, limits, options.progress)
    spec.known.remember_thrifty(thrifty.plan)
    store_least_plan(spec.hoped.graph, "thrifty", thrifty, options)
    return _range_of(graph, thrifty.plan, new_gradient_bytes)


def rough_range(
    spec: Specialisation, around: Surroundings, options: Options, new_gradient_bytes: int
) -> KeptRange | None:
    """Return the bytes that plans of a step may keep, as far as known or quickly found.

    None: the step is too large for that.
    """
    graph = around.around(spec.hoped)
    least, thrifty = (
        _fitting_anything(graph, earlier_plan(spec.hoped.graph, role, around.gradients, options))
        for role in ("least", "thrifty")
    )
    if least is None or thrifty is None:
        if len(graph.ops) > _MOST_OPS_AT_ONCE:
            return None
        return quick_range(spec, around, options, new_gradient_bytes, _AT_ONCE)
    if spec.postponed is None:
        spec.known.remember(least)
    spec.known.remember_thrifty(thrifty)
    return _range_of(graph, thrifty, new_gradient_bytes)


def _fitting_anything(graph: Graph, plan: Plan | None) -> Plan | None:
    """Return a plan of a graph if it is valid, for a budget that is just its peak."""
    if plan is None:
        return None
    task = Task(graph=graph, budget_bytes=sys.maxsize, gradients=plan.gradients)
    found = valid_outcomes(task, (plan,))
    return msgspec.structs.replace(plan, budget_bytes=found[0].peak_bytes) if found else None


def most_kept(
    spec: Specialisation, around: Surroundings, new_gradient_bytes: int
) -> tuple[int, int]:
    """Return peak and kept bytes of the plan that keeps everything for its backward."""
    graph = around.around(spec.captured)
    return _most(graph, around.gradients, new_gradient_bytes)


def kept_bytes(graph: Graph, plan: Plan) -> int:
    """Return the bytes that a plan keeps between forward and backward."""
    return _peak_and_kept(graph, plan, 0)[1]


def _range_of(graph: Graph, thrifty: Plan, new_gradient_bytes: int) -> KeptRange:
    """Return the bytes that plans of a step may keep; its inputs exist before it.

    `graph`: the step with memory resident around it. `thrifty`: the plan that keeps least for its
    backward.
    """
    least_peak, least_kept = _peak_and_kept(graph, thrifty, new_gradient_bytes)
    most_peak, most_kept = _most(graph, thrifty.gradients, new_gradient_bytes)
    working = max(least_peak - least_kept, most_peak - most_kept)
    return KeptRange(least_kept, most_kept, working)


def _most(graph: Graph, gradients: Gradients, new_gradient_bytes: int) -> tuple[int, int]:
    return _peak_and_kept(graph, everything_kept(graph, gradients), new_gradient_bytes)


def _peak_and_kept(graph: Graph, plan: Plan, new_gradient_bytes: int) -> tuple[int, int]:
    """Return a plan's peak and its bytes between forward and backward, without constants."""
    result, constant = simulate(graph, plan), graph.constant_bytes
    return result.peak_bytes - constant - new_gradient_bytes, result.crossing_bytes - constant
