"""Finds a plan of a step for memory resident around it now: at once, or by a search."""

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
from tightfit.plan.assemble import everything_kept
from tightfit.plan.plan import Gradients, Outcome, Plan
from tightfit.plan.simulate import simulate
from tightfit.planners.background import Search
from tightfit.planners.base import Limits, Task
from tightfit.planners.outcomes import judged, valid_outcomes
from tightfit.planners.questions.minimum import MinimumBudget
from tightfit.planners.registry import DEFAULT
from tightfit.progress import Progress, announce
from tightfit.session.memory.surroundings import Surroundings, forward_output_bytes
from tightfit.session.options import Options
from tightfit.session.processes import agreed
from tightfit.session.stages import cached_outcome, in_groups, key_of, plan_at_once, plan_step
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
_ANNOUNCED = 0.001  # of overhead that a better plan saves, at least
_GOOD_ENOUGH = 0.1  # of overhead, for the few seconds until a search has found a better plan


class NeedsComparisons(Exception):
    """No known plan fits, and alternatives of the step are still to be compared."""


@dataclass(frozen=True)
class PlanningRequest:
    """The call that a plan is for, and how to find it.

    `inputs`: the tensors of the placeholders, for trial runs of compiled plans. `others`: returns
    plans of the same callable at other shapes. `searches`: whether to search before training, not
    in the background. `least`: whether to begin with the known plan that holds least. `once`:
    whether the plan is for this call alone, so that no better plan is searched. `before_search`:
    returns a plan to run instead of waiting for a search, or None.
    """

    inputs: Sequence[Any]
    options: Options
    name: str
    others: Callable[[], Iterable[Plan]]
    searches: bool = False
    least: bool = False
    once: bool = False
    before_search: Callable[[], Planned | None] = lambda: None


def planned_for(
    spec: Specialisation, surroundings: Surroundings, request: PlanningRequest
) -> Planned:
    """Return a plan for memory resident around a step now, ready to run.

    A step runs the best known plan, and a better plan once a search in the background has found it.
    Only where no known plan fits, the step waits for a search, or for compiled plans to be tried.

    Raises `NeedsComparisons` if a plan may need alternatives that are still to be compared.
    """
    options, name = request.options, request.name
    surroundings = spec.with_measured_user_code(surroundings)
    planned = spec.fitting(surroundings)
    if planned is None and request.least and not request.searches and options.plan is None:
        planned = _least_planned(spec, surroundings, options)
    if planned is None and options.compile:
        planned = spec.add_plan(
            surroundings, _compiled(spec, surroundings.task(spec.captured), request)
        )
    elif planned is None:
        planned = _first_planned(spec, surroundings, request)
    elif not options.compile and spec.may_gain(surroundings, planned):
        _search(spec, surroundings, surroundings.task(spec.captured), options)
    ended = spec.ended_search(surroundings)
    return planned if ended is None else _better(spec, *ended, planned, options, name)


def _compiled(spec: Specialisation, task: Task, request: PlanningRequest) -> Planned:
    """Return the fastest plan within the budget, compiled or not."""
    if request.options.ranks is not None:
        raise CompileError(
            f"{request.name} runs under DistributedDataParallel, where every process must run the "
            "same plan, but each compiles and measures its own. Way out: compile=False"
        )
    return fastest_plan(spec, task, request.options, request.inputs, request.name)


def _first_planned(
    spec: Specialisation, surroundings: Surroundings, request: PlanningRequest
) -> Planned:
    """Return the first plan for some surroundings, made at once where that can be."""
    options = request.options
    task = surroundings.task(spec.captured)
    at_hand = (*spec.known.all(), *request.others())
    outcome = None
    if request.searches and spec.postponed is not None:
        raise NeedsComparisons
    if options.ranks is None and not request.searches and options.planner == DEFAULT:
        planned = _with_room_to_grow(spec, surroundings, at_hand, request)
        if planned is not None:
            return planned
        outcome = _leaving_room(spec, surroundings, at_hand, request)
    if outcome is None:
        outcome = _outcome_at_once(spec, surroundings, task, at_hand, request)
    if outcome is None:
        planned = request.before_search()
        if planned is not None:
            return planned
        outcome = _any_outcome(spec, surroundings, task, request)
    return spec.add_plan(surroundings, _lowered(spec, task.graph, outcome, options))


def planned_at_once(
    spec: Specialisation, surroundings: Surroundings, options: Options, released_bytes: int
) -> Planned | None:
    """Return the best known plan, or a plan that is found at once; None: none fits.

    A better plan is searched in the background. Where the forward of a plan leaves no room for
    `released_bytes`, a plan for a smaller budget is made.
    """
    task = surroundings.task(spec.captured)
    kept = everything_kept(task.graph, task.gradients)
    over_bytes = 0
    for _ in range(_MOST_TIGHTENED):
        surroundings = dataclasses.replace(
            surroundings, budget_bytes=surroundings.budget_bytes - over_bytes
        )
        own = surroundings.task(spec.captured)
        outcome, is_final = _quick_outcome(spec, own, options, (kept, *spec.known.all()))
        if outcome is None:
            return None
        assert outcome.plan is not None
        forward_bytes = forward_peak_bytes(own.graph, outcome.plan)
        over_bytes = forward_bytes + released_bytes - task.budget_bytes
        if over_bytes <= 0:
            if not is_final:
                _search(spec, surroundings, own, options)
            return spec.add_plan(surroundings, _lowered(spec, own.graph, outcome, options))
    return None


def planned_meanwhile(
    spec: Specialisation, surroundings: Surroundings, plan: Plan, options: Options
) -> Planned | None:
    """Return a given plan to run until a search has found a better; None: see `planned_as`."""
    planned = planned_as(spec, surroundings, plan, options)
    if planned is None:
        return None
    _search(spec, surroundings, surroundings.task(spec.captured), options)
    return spec.add_plan(surroundings, planned)


def improved(spec: Specialisation, planned: Planned, request: PlanningRequest) -> Planned:
    """Return a better plan that a search for the same surroundings has found; else the given."""
    made_for = spec.made_for(planned)
    ended = None if made_for is None else spec.ended_search(made_for)
    if ended is None:
        return planned
    return _better(spec, *ended, planned, request.options, request.name)


def planned_as(
    spec: Specialisation, surroundings: Surroundings, plan: Plan, options: Options
) -> Planned | None:
    """Return a given plan ready to run; None: it is invalid, or alternatives are not compared."""
    task = surroundings.task(spec.captured)
    if spec.postponed is not None:
        return None
    found = valid_outcomes(task, (msgspec.structs.replace(plan, graph=fingerprint(task.graph)),))
    return _lowered(spec, task.graph, found[0], options) if found else None


def _least_planned(
    spec: Specialisation, surroundings: Surroundings, options: Options
) -> Planned | None:
    """Return the known plan that keeps least for its backward or has the least peak, if it fits."""
    task = surroundings.task(spec.captured)
    least_kept = spec.known.least_kept(task.gradients)
    found = valid_outcomes(task, (least_kept,) if least_kept is not None else ())
    found = found or valid_outcomes(task, spec.known.all())
    if not found:
        return None
    outcome = min(found, key=lambda outcome: outcome.peak_bytes)
    planned = _lowered(spec, task.graph, outcome, options)
    if options.compile:  # a plan that runs once is not worth it, and would stay
        return planned
    # as if there were no more room, so that a better plan is searched where there is
    own = dataclasses.replace(surroundings, budget_bytes=outcome.peak_bytes)
    return spec.add_plan(own, planned)


def _with_room_to_grow(
    spec: Specialisation,
    surroundings: Surroundings,
    at_hand: Sequence[Plan],
    request: PlanningRequest,
) -> Planned | None:
    """Return a plan with room for other memory to grow once more as it has; None: none fits.

    Memory that grows from step to step, as the history of LBFGS does, would need a new plan each
    time. None: it has not grown, or no plan fits.
    """
    options = request.options
    grown_bytes = spec.grown_bytes(surroundings)
    if grown_bytes == 0 or options.plan is not None:
        return None
    later = surroundings.with_others(surroundings.others_bytes + grown_bytes)
    task = later.task(spec.captured)
    outcome, is_final = _quick_outcome(spec, task, options, at_hand)
    if outcome is None:
        return None
    if not is_final and not request.once:
        _search(spec, later, task, options)
    return spec.add_plan(later, _lowered(spec, task.graph, outcome, options))


def _leaving_room(
    spec: Specialisation,
    surroundings: Surroundings,
    at_hand: Sequence[Plan],
    request: PlanningRequest,
) -> Outcome | None:
    """Return a first plan with as much room for user code as possible; see `with_more_room`."""
    options = request.options
    output_bytes = forward_output_bytes(spec.captured)
    has_run = spec.plans or spec.user_code.is_known
    if has_run or options.plan is not None or output_bytes <= surroundings.others_bytes:
        return None
    tasks = (each.task(spec.captured) for each in with_more_room(spec, surroundings))
    outcomes = (_quick_outcome(spec, task, options, at_hand) for task in tasks)
    found, is_final = next((each for each in outcomes if each[0] is not None), (None, False))
    if found is None or found.plan is None:
        if spec.postponed is not None:
            raise NeedsComparisons
        return None
    task = surroundings.task(spec.captured)
    if not is_final and not request.once:
        _search(spec, surroundings, task, options)
    plan = msgspec.structs.replace(found.plan, graph=fingerprint(task.graph))
    return next(iter(valid_outcomes(task, (plan,))), None)


def _outcome_at_once(
    spec: Specialisation,
    surroundings: Surroundings,
    task: Task,
    at_hand: Sequence[Plan],
    request: PlanningRequest,
) -> Outcome | None:
    """Return a plan to start with, while a search goes on; None: none fits.

    Where the user waits for a search, return its plan.
    """
    options = request.options
    asked = request.searches or options.planner != DEFAULT
    if asked and not spec.is_further:
        return _searching(spec, task, options)(options.progress)
    outcome, is_final = agreed(
        options.ranks,
        f"quick plan {key_of(task, options)}",
        tuple[Outcome | None, bool],
        lambda: _quick_outcome(spec, task, options, at_hand),
    )
    if outcome is None and spec.postponed is not None:
        raise NeedsComparisons
    if outcome is not None and not is_final and not request.once:
        _search(spec, surroundings, task, options)
    return outcome


def _any_outcome(
    spec: Specialisation, surroundings: Surroundings, task: Task, request: PlanningRequest
) -> Outcome:
    """Search until any plan is found, as a step waits for it; a better plan is searched later."""
    options = request.options
    if spec.is_further:
        announce(f"{request.name}: no known plan fits the new inputs; searching a plan")
    limits = msgspec.structs.replace(options.limits, gap=_ANY_GAP)
    first = _searching(spec, task, dataclasses.replace(options, limits=limits))(options.progress)
    assert first.plan is not None
    if not request.once:
        _search(spec, surroundings, task, options)
    return judged(task, first.plan)


def _search(spec: Specialisation, surroundings: Surroundings, task: Task, options: Options) -> None:
    spec.search(surroundings, _searching(spec, task, options, apart=True))


def _searching(
    spec: Specialisation, task: Task, options: Options, *, apart: bool = False
) -> Callable[[Progress], Outcome]:
    """Return the full search; it holds neither the model nor its optimizer."""
    known = spec.known.smallest(task.gradients)
    options = dataclasses.replace(options, optimizer=None, shared=None, steps=None)

    def search(progress: Progress) -> Outcome:
        own = dataclasses.replace(options, progress=progress)
        return plan_step(task, own, known, apart=apart)

    return search


def _quick_outcome(
    spec: Specialisation, task: Task, options: Options, others: Iterable[Plan]
) -> tuple[Outcome | None, bool]:
    """Return the best plan that is found within about a second, and whether it is final.

    Candidates are the plan in the cache and plans of this and other shapes, each verified on this
    graph. Plans that were searched before costs came from steps are good enough. Otherwise the
    default planner searches at once, too. A final plan is optimal, or the result of a search.
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
    """Return the plan that a search has found, or the plan before if that costs less."""
    try:
        outcome = search.result()
    except TightfitError as error:
        announce(f"{name}: the search for a better plan has failed: {error}")
        return before
    if outcome is None or outcome.overhead > before.outcome.overhead:
        return before
    if before.outcome.overhead - outcome.overhead > _ANNOUNCED:
        announce(
            f"{name}: a better plan was found, overhead {outcome.overhead:+.1%} instead "
            f"of {before.outcome.overhead:+.1%}"
        )
    graph = made_for.graph_of(spec.captured)
    return spec.add_plan(made_for, _lowered(spec, graph, outcome, options))


def _lowered(spec: Specialisation, graph: Graph, outcome: Outcome, options: Options) -> Planned:
    assert outcome.plan is not None
    plan = in_groups(graph, outcome, options)
    if options.ranks is not None:  # all run, and know, the same
        outcome = msgspec.structs.replace(outcome, plan=plan)
    spec.known.remember(outcome.plan)
    store_plan(spec.captured.graph, "last" if spec.plans else "first", outcome, options)
    clock = spec.tuner.clock if spec.tuner is not None else None
    program = lower(spec.captured, plan, clock=clock)
    if plan.far is None:
        return Planned(graph, outcome, Runner(spec.captured, program))
    assert options.far_memory is not None
    moves = Moves()
    begin = partial(options.far_memory.begin_step, spec.captured.joint.device)
    program = moving_program(program, begin, moves.ended)
    return Planned(graph, outcome, Runner(spec.captured, program), moves=moves)


def smallest_budget(
    spec: Specialisation, surroundings: Surroundings, options: Options
) -> MinimumBudget:
    """Find the smallest budget with a plan; remember the plan.

    Alternatives that are still to be compared count as if they were as exact as they state.
    """
    graph = surroundings.graph_of(spec.with_postponed)
    least = spec.least_budgets.find(graph, surroundings.gradients, options.limits, options.progress)
    if spec.postponed is None:
        spec.known.remember(least.plan)
    store_least_plan(spec.with_postponed.graph, "least", least, options)
    return least


def quick_range(
    spec: Specialisation,
    surroundings: Surroundings,
    options: Options,
    new_gradient_bytes: int,
    limits: Limits = _QUICKLY,
) -> KeptRange:
    """Return the bytes that plans of a step may keep; found by two searches."""
    least = smallest_budget(spec, surroundings, dataclasses.replace(options, limits=limits))
    graph = surroundings.graph_of(spec.with_postponed)
    # as if so much came between forward and backward that kept bytes decide
    crowded = graph.with_outside(least.found_bytes - graph.constant_bytes)
    least_kept = spec.least_budgets.find(crowded, surroundings.gradients, limits, options.progress)
    spec.known.remember_least_kept(least_kept.plan)
    store_least_plan(spec.with_postponed.graph, "thrifty", least_kept, options)
    return _range_of(graph, least_kept.plan, new_gradient_bytes)


def rough_range(
    spec: Specialisation, surroundings: Surroundings, options: Options, new_gradient_bytes: int
) -> KeptRange | None:
    """Return the bytes that plans of a step may keep, by plans of an earlier process if any.

    None: there are none, and the step is too large to find some at once.
    """
    graph = surroundings.graph_of(spec.with_postponed)
    least, least_kept = (
        _fitting_anything(
            graph, earlier_plan(spec.with_postponed.graph, role, surroundings.gradients, options)
        )
        for role in ("least", "thrifty")
    )
    if least is None or least_kept is None:
        if len(graph.ops) > _MOST_OPS_AT_ONCE:
            return None
        return quick_range(spec, surroundings, options, new_gradient_bytes, _AT_ONCE)
    if spec.postponed is None:
        spec.known.remember(least)
    spec.known.remember_least_kept(least_kept)
    return _range_of(graph, least_kept, new_gradient_bytes)


def _fitting_anything(graph: Graph, plan: Plan | None) -> Plan | None:
    """Return a plan, with its peak as its budget; None: it is not valid for the graph."""
    if plan is None:
        return None
    task = Task(graph=graph, budget_bytes=sys.maxsize, gradients=plan.gradients)
    found = valid_outcomes(task, (plan,))
    return msgspec.structs.replace(plan, budget_bytes=found[0].peak_bytes) if found else None


def most_kept(
    spec: Specialisation, surroundings: Surroundings, new_gradient_bytes: int
) -> tuple[int, int]:
    """Return peak and kept bytes of the plan that keeps everything; see `_peak_and_kept`."""
    graph = surroundings.graph_of(spec.captured)
    return _most(graph, surroundings.gradients, new_gradient_bytes)


def kept_bytes(graph: Graph, plan: Plan) -> int:
    """Return the bytes that a plan keeps between forward and backward."""
    return _peak_and_kept(graph, plan, 0)[1]


def _range_of(graph: Graph, plan: Plan, new_gradient_bytes: int) -> KeptRange:
    """Return the bytes that plans of a step may keep; `plan`: the plan that keeps least."""
    least_peak, least_kept = _peak_and_kept(graph, plan, new_gradient_bytes)
    most_peak, most_kept = _most(graph, plan.gradients, new_gradient_bytes)
    working = max(least_peak - least_kept, most_peak - most_kept)
    return KeptRange(least_kept, most_kept, working)


def _most(graph: Graph, gradients: Gradients, new_gradient_bytes: int) -> tuple[int, int]:
    return _peak_and_kept(graph, everything_kept(graph, gradients), new_gradient_bytes)


def _peak_and_kept(graph: Graph, plan: Plan, new_gradient_bytes: int) -> tuple[int, int]:
    """Return a plan's peak and its bytes between forward and backward, without constants."""
    result, constant = simulate(graph, plan), graph.constant_bytes
    return result.peak_bytes - constant - new_gradient_bytes, result.crossing_bytes - constant
