"""The plan of a step for the constants of now: at once for a further shape, better ones later."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tightfit.errors import CompileError, InvalidPlan, PlanMismatch, TightfitError
from tightfit.execution.lower import lower
from tightfit.execution.runtime import Runner
from tightfit.graph.fingerprint import fingerprint
from tightfit.graph.ir import Graph
from tightfit.plan.assemble import assemble, handing_over_singly, keep_everything
from tightfit.plan.plan import Enter, Gradients, Outcome, Plan
from tightfit.plan.simulate import simulate
from tightfit.plan.verify import verify
from tightfit.planners.base import Limits, Task
from tightfit.planners.outcomes import judged
from tightfit.planners.questions.minimum import MinimumBudget, minimum_budget
from tightfit.planners.registry import plan_with
from tightfit.pricing.in_steps import StepCosts, Tuner, recall, remember, with_step_costs
from tightfit.progress import Progress, announce
from tightfit.session.background import Search, searching
from tightfit.session.memory.account import (
    gradient_bytes,
    new_gradient_bytes,
    optimizer_state_bytes,
)
from tightfit.session.memory.budget import Budget, Needs, share_of
from tightfit.session.memory.surroundings import root_gradient_bytes
from tightfit.session.options import Options
from tightfit.session.processes import agreed
from tightfit.session.stages import cached_outcome, plan_step
from tightfit.session.whole.compiling import fastest_plan
from tightfit.session.whole.specialisation import Planned, Shape

if TYPE_CHECKING:
    from tightfit.session.whole.steps import Session

__all__ = [
    "declare_needs",
    "held_gradient_bytes",
    "planned_for",
    "quick_outcome",
    "recall_costs",
    "smallest_budget",
    "state_bytes",
]

_SETTLED_CALLS = 4  # the optimizer's state exists by then
_WORTH_A_WORD = 0.001  # of overhead that a plan saves


def planned_for(
    session: Session, shape: Shape, gradients: Gradients, inputs: Sequence[Any]
) -> Planned:
    """Return a plan for the constants of now, ready to run; make it if needed.

    The first shape of inputs waits for the planner. A further one runs the best plan at hand,
    and takes a better one between two steps, once a search in the background has found it. A
    compiled plan is tried on the inputs and waited for.
    """
    if shape.tuner is not None and shape.tuner.is_ready:
        _tune(session, shape)
    graph = shape.captured.graph
    existing = held_gradient_bytes(session, graph)
    state = state_bytes(session, graph)
    share = share_of(session, graph, graph.constant_bytes + existing + state)
    outside_bytes = max(shape.outside_bytes, share.others_bytes)
    key = (gradients, existing, state, outside_bytes, share.peak_bytes)
    if key not in shape.plans:  # made with what was seen by now; those that fit so too stay
        outside_bytes = max(outside_bytes, shape.seen_outside_bytes)
        key = (gradients, existing, state, outside_bytes, share.peak_bytes)
    if key not in shape.plans:
        graph = _with_surroundings(shape, existing, state, outside_bytes)
        task = Task(graph=graph, budget_bytes=share.peak_bytes, gradients=gradients)
        if session.options.compile:
            shape.plans[key] = _compiled(session, shape, task, inputs)
        else:
            outcome = _first_outcome(session, shape, key, task)
            shape.plans[key] = _lowered(session, shape, graph, outcome)
    search = shape.searches.get(key)
    if search is not None and search.is_done:
        del shape.searches[key]
        _take(session, shape, key, search)
    return shape.plans[key]


def _compiled(session: Session, shape: Shape, task: Task, inputs: Sequence[Any]) -> Planned:
    """Return the fastest plan within the budget, compiled or not."""
    if session.options.ranks is not None:
        raise CompileError(
            f"{session.name} runs under DistributedDataParallel, where every process must run the "
            "same plan, but each compiles and measures its own. Way out: compile=False"
        )
    planned = fastest_plan(shape, task, session.options, inputs, session.name)
    if session.guard is not None:
        session.guard.restart()  # what compiling and trying took belongs to no step
    return planned


def _first_outcome(session: Session, shape: Shape, key: Any, task: Task) -> Outcome:
    """Return a plan to start with: searched, or the best at hand while the search goes on."""
    options = session.options
    known = shape.known_plans.get(task.gradients)

    def search(progress: Progress) -> Outcome:
        own = dataclasses.replace(options, progress=progress)
        return plan_step(task.graph, task.budget_bytes, task.gradients, own, known)

    if not shape.is_further:
        return search(options.progress)
    others = [plan for other in session.all_shapes() for plan in other.known_plans.values()]
    outcome, is_final = agreed(
        options.ranks,
        f"quick plan {task.budget_bytes} {task.gradients} {fingerprint(task.graph)}",
        tuple[Outcome | None, bool],
        lambda: quick_outcome(task, options, others),
    )
    if outcome is None:
        announce(f"{session.name}: no plan at hand fits the new inputs; searching one")
        return search(options.progress)
    if not is_final:
        shape.searches[key] = Search(search)
    return outcome


def _take(session: Session, shape: Shape, key: Any, search: Search) -> None:
    """Put the plan a search has found in place of the one at hand, unless that costs less."""
    try:
        outcome = search.result()
    except TightfitError as error:
        announce(f"{session.name}: the search for a better plan ended without one: {error}")
        return
    before = shape.plans[key]
    if outcome is None or outcome.overhead > before.outcome.overhead:
        return
    if before.outcome.overhead - outcome.overhead > _WORTH_A_WORD:
        announce(
            f"{session.name}: a better plan was found, overhead {outcome.overhead:+.1%} instead "
            f"of {before.outcome.overhead:+.1%}"
        )
    shape.plans[key] = _lowered(session, shape, before.graph, outcome)


def _lowered(session: Session, shape: Shape, graph: Graph, outcome: Outcome) -> Planned:
    assert outcome.plan is not None
    if session.options.ranks is not None:  # another rank has made it; all send gradients early
        plan = handing_over_singly(graph, outcome.plan)
        verify(plan, graph)
        outcome = msgspec.structs.replace(outcome, plan=plan)
    shape.remember_plan(outcome.plan)
    clock = shape.tuner.clock if shape.tuner is not None else None
    program = lower(shape.captured, outcome.plan, clock=clock)
    return Planned(graph, outcome, Runner(shape.captured, program))


def smallest_budget(session: Session, shape: Shape, gradients: Gradients) -> MinimumBudget:
    """Find the smallest budget with a plan; the plan is kept in mind."""
    options = session.options
    graph = _surrounded(session, shape)
    least = minimum_budget(graph, gradients, options.limits, options.progress)
    shape.remember_plan(least.plan)
    return least


def declare_needs(
    session: Session, shape: Shape, gradients: Gradients, budget: Budget
) -> MinimumBudget:
    """Tell a budget that is to be shared what plans of a step can do with; return the least."""
    least = smallest_budget(session, shape, gradients)
    graph = _surrounded(session, shape)
    everything = assemble(
        graph, keep_everything(graph), budget_bytes=sys.maxsize, gradients=gradients
    )
    new = new_gradient_bytes(session.modules, graph.device.granularity_bytes)
    lasting = graph.constant_bytes - graph.constants_bytes["inputs"]
    (least_peak, least_kept), (most_peak, most_kept) = (
        _peak_and_kept(graph, plan) for plan in (least.plan, everything)
    )
    needs = Needs(
        least_peak=least_peak - lasting - new,
        least_kept=least_kept - lasting,
        most_peak=most_peak - lasting - new,
        most_kept=most_kept - lasting,
    )
    budget.declare(session, needs)
    return least


def _peak_and_kept(graph: Graph, plan: Plan) -> tuple[int, int]:
    """Return the peak of a plan and what is alive between forward and backward."""
    result = simulate(graph, plan)
    crossing = next(
        i
        for i, step in enumerate(plan.instructions)
        if isinstance(step, Enter) and graph.segments[step.segment].phase == "backward"
    )
    return result.peak_bytes, result.after_bytes[crossing - 1]


def _surrounded(session: Session, shape: Shape) -> Graph:
    """Return a step's graph with the constants of now and what its own user code holds."""
    graph = shape.captured.graph
    existing, state = held_gradient_bytes(session, graph), state_bytes(session, graph)
    return _with_surroundings(shape, existing, state, shape.outside_bytes)


def _with_surroundings(
    shape: Shape, existing_bytes: int, state_bytes: int, outside_bytes: int
) -> Graph:
    """Return the step's graph with what lies around it: constants, and what user code holds."""
    graph = shape.captured.graph.with_constants(
        gradients=existing_bytes,
        optimizer_state=state_bytes,
        gradient_of_loss=root_gradient_bytes(shape.captured),
    )
    return graph.with_outside(outside_bytes)


def held_gradient_bytes(session: Session, graph: Graph) -> int:
    """Return the bytes of the gradients that exist and of the buckets they go into."""
    granularity = graph.device.granularity_bytes
    buckets = session.replicas.bucket_bytes(granularity) if session.replicas is not None else 0
    return gradient_bytes(session.modules, granularity) + buckets


def state_bytes(session: Session, graph: Graph) -> int:
    """Return the optimizer state that exists, is predicted, or was seen to appear."""
    if session.options.optimizer is None and session.seen_state_bytes is not None:
        return session.seen_state_bytes
    if session.state_bytes is None or session.calls < _SETTLED_CALLS:
        session.state_bytes = optimizer_state_bytes(
            session.options.optimizer,
            session.modules,
            graph.device.granularity_bytes,
            graph.device.kind,
            own=session.options.shared is not None,
        )
    return session.state_bytes


def _tune(session: Session, shape: Shape) -> None:
    """Put costs from real steps in place of isolated ones, once; plans are made anew."""
    assert shape.tuner is not None
    graph, ranks = shape.captured.graph, session.options.ranks
    costs = agreed(ranks, f"step costs {fingerprint(graph)}", StepCosts, shape.tuner.costs)
    if session.options.cache:
        remember(graph, costs)
    shape.captured = shape.captured.with_graph(with_step_costs(graph, costs))
    shape.tuner = None
    shape.forget_plans()


def recall_costs(session: Session, shape: Shape) -> None:
    """Use costs from steps of an earlier process, else time the first steps of this one."""
    graph, ranks = shape.captured.graph, session.options.ranks
    own = recall(graph) if session.options.cache else None
    costs = agreed(ranks, f"kept costs {fingerprint(graph)}", StepCosts | None, lambda: own)
    if costs is None:
        shape.tuner = Tuner(searching)
    else:
        shape.captured = shape.captured.with_graph(with_step_costs(graph, costs))


_GREEDY_S = 1.0


def quick_outcome(
    task: Task, options: Options, others: Iterable[Plan]
) -> tuple[Outcome | None, bool]:
    """Return the best plan that is at hand in a fraction of a second.

    Candidates are the plan that an earlier process kept, a greedy one, and those of other shapes,
    each verified on this graph.

    Parameters
    ----------
    task : Task
        The step at its new shape.
    options : Options
        The user's; they name the cache.
    others : iterable of Plan
        Plans of the same callable at other shapes or costs.

    Returns
    -------
    outcome : Outcome or None
        None if none of them fits.
    is_final : bool
        Whether it is what the full search had found before.
    """
    known = cached_outcome(task, options)
    if known is not None:
        return known, True
    greedy = plan_with("greedy", task, Limits(seconds=_GREEDY_S))
    found = [greedy] if greedy.plan is not None else []
    for plan in others:
        moved = msgspec.structs.replace(plan, graph=fingerprint(task.graph))
        if plan.gradients == task.gradients:
            with contextlib.suppress(InvalidPlan, PlanMismatch):
                found.append(judged(task, moved))
    return min(found, key=lambda outcome: outcome.overhead, default=None), False
