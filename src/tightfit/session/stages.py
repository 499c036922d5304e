"""The stages from a call to its plan: capture, alternatives, prices, search."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NoReturn

import msgspec
from torch import nn

from tightfit.allocator.caching import return_cached
from tightfit.alternatives.registry import with_alternatives
from tightfit.capture.capture import capture
from tightfit.capture.captured import Captured, parameters_of
from tightfit.capture.exclusive import capture_exclusively
from tightfit.capture.stepping.steps import with_parameter_steps
from tightfit.capture.trace.strides import TrueStrides
from tightfit.capture.traced_call import TracedCall
from tightfit.costs import with_costs
from tightfit.graph.fingerprint import fingerprint
from tightfit.graph.ir import Exactness, Graph
from tightfit.plan.assemble import GROUP_BYTES, handing_over_in_groups
from tightfit.plan.cache import PlanCache, PlanKey, plan_key
from tightfit.plan.plan import Outcome, Plan
from tightfit.plan.simulate import simulate
from tightfit.plan.verify import verify
from tightfit.planners.apart import plan_apart
from tightfit.planners.base import Limits, Task
from tightfit.planners.outcomes import judged
from tightfit.planners.questions.infeasible import infeasible
from tightfit.planners.questions.minimum import minimum_budget
from tightfit.planners.registry import DEFAULT, plan_with
from tightfit.pricing.further import further_costs
from tightfit.pricing.price import (
    Priced,
    Prices,
    measured_costs,
    measured_workspaces,
    priced_as_kernels_run,
    prices_of,
    scaled_costs,
    with_prices,
)
from tightfit.pricing.quick import quick_costs
from tightfit.progress import SILENT, Interrupts, said_while_waiting
from tightfit.session.memory.devices import device_of_modules, library_bytes
from tightfit.session.options import Options
from tightfit.session.processes import agreed
from tightfit.units import as_budget

_AT_ONCE_S = 0.3
_LEAST_S = 3.0  # for the schedule that plans for less room begin from
_AMPLE_BYTES = 1 << 60
_ANY_GAP = 1e3  # of overhead: more than any plan has
_SPARE_SHARE = 8  # of the bytes that a plan leaves, such a part is for gradients of one group
_MOST_GROUPS = 64  # of gradients that are handed over together: each is a node of autograd's
_FURTHER_FAR = 0.05  # of what a plan moves: later calls need another plan, with a little more


@dataclass(frozen=True)
class Pricing:
    """How the alternatives of a captured step are found and priced.

    `neighbour`: the graph of the same callable at another shape, whose costs are scaled.
    `is_checked`: whether `Captured.conditions` are checked in every step. `room_bytes`: bytes that
    measuring may hold while a step waits for it: unknown costs are measured quickly, and better
    in the next steps. None: no step waits, and every operator is measured well. `postpones`:
    whether alternatives that take long to compare are compared later (`Captured.with_postponed`).
    """

    neighbour: Graph | None = None
    is_checked: bool = False
    room_bytes: int | None = None
    postpones: bool = False


_THOROUGH = Pricing()


def capture_step(
    call: TracedCall, options: Options, name: str, pricing: Pricing = _THOROUGH
) -> Captured:
    """Capture a step, add every alternative, and price each of them.

    Costs come from measurements on the device, from a neighbour or from a model, by
    `options.costs`; workspaces are always measured. Of several ranks only one measures.
    """
    with _announcing(options, f"capturing {name} and measuring time and memory of its operators"):
        captured = capture_exclusively(lambda: _captured_and_priced(call, options, name, pricing))
    captured.joint.opaque.forget_examples()
    return_cached(device_of_modules(call.modules))  # operators that were measured left holes
    return captured


def _captured_and_priced(
    call: TracedCall, options: Options, name: str, pricing: Pricing
) -> Captured:
    kept_bytes = library_bytes(device_of_modules(call.modules))

    def traced(strides: TrueStrides) -> Captured:
        steps = options.steps
        step = capture(call, name=name, strides=strides, recalls=options.cache, stepper=steps)
        present = parameters_of(step.joint, call.modules) if pricing.is_checked else {}
        step = with_alternatives(step, options.exactness, present=present)
        if steps is not None:
            step = with_parameter_steps(step, call.modules, steps)
        if not kept_bytes:
            return step
        return step.with_graph(step.graph.with_constants(libraries=kept_bytes))

    def priced(step: Captured) -> Priced:
        return _priced(step, options, pricing)

    first = traced({})
    if options.ranks is None:
        return priced_as_kernels_run(first, traced, priced).captured
    prices = options.ranks.once(
        f"costs {options.costs} of {fingerprint(first.graph)} on {first.graph.device.name}",
        Prices,
        lambda: prices_of(priced_as_kernels_run(first, traced, priced)),
    )
    return with_prices(traced(prices.strides) if prices.strides else first, prices)


def _priced(captured: Captured, options: Options, pricing: Pricing) -> Priced:
    if options.costs != "measured":
        return _modelled(captured, options)
    room_bytes, neighbour = pricing.room_bytes, pricing.neighbour
    postpones = pricing.postpones and not captured.conditions  # which cannot be checked later
    if room_bytes is not None and captured.graph.device.kind == "cpu":  # steps will teach the rest
        return quick_costs(
            captured,
            options.progress,
            room_bytes=room_bytes,
            neighbour=neighbour,
            postpones=postpones,
        )
    if neighbour is not None:
        return scaled_costs(captured, neighbour, options.progress)
    return measured_costs(
        captured, options.progress, postpones=postpones and room_bytes is not None
    )


def _modelled(captured: Captured, options: Options) -> Priced:
    """Return a step with modelled costs and measured workspaces."""
    graph = with_costs(captured.graph, options.costs)
    return measured_workspaces(captured.with_graph(graph), options.progress)


def less_exact_step(
    step: Captured,
    exactness: Exactness,
    options: Options,
    modules: Mapping[str, nn.Module],
    room_bytes: int,
) -> Captured:
    """Return a priced step with the alternatives of a less exact class in addition.

    `modules`: those of the step; some alternatives rest on the present values of weights.
    `room_bytes`: memory for comparing an alternative with its default.
    """
    plain = step.plain or step
    wider = with_alternatives(plain, exactness, present=parameters_of(plain.joint, modules))
    if options.steps is not None:
        wider = with_parameter_steps(wider, modules, options.steps)
    wider = wider.with_graph(wider.graph.with_constants(**step.graph.constants_bytes))
    if options.costs != "measured":
        return _modelled(wider, options).captured
    return further_costs(wider, step, options.progress, room_bytes=room_bytes)


def plan_step(
    task: Task, options: Options, known: Plan | None = None, *, apart: bool = False
) -> Outcome:
    """Return a verified plan within the budget; the plan on disk if this was planned before.

    `known`: an earlier plan of this step; used if it fits and the planner finds none. `apart`:
    whether another process searches, while this process trains. Raises `InfeasibleBudget`, which
    names the least budget and the values that must be alive at its peak. Raises `InvalidPlan` or
    `PlanMismatch` if the user's own plan does not fit this graph or budget.
    """
    key = f"plan {key_of(task, options)}"
    return agreed(options.ranks, key, Outcome, lambda: _found(task, options, known, apart))


def plan_at_once(task: Task, options: Options) -> Outcome:
    """Return the plan that the default planner finds at once; cached if it is optimal."""
    limits = Limits(seconds=min(_AT_ONCE_S, options.limits.seconds), gap=options.limits.gap)
    outcome = _interruptible(task, options, None, limits)
    if outcome.status == "optimal" and options.cache and options.planner == DEFAULT:
        PlanCache().store(key_of(task, options), outcome)
    return outcome


def _found(task: Task, options: Options, known: Plan | None, apart: bool) -> Outcome:
    outcome = cached_outcome(task, options)
    if outcome is None:
        outcome = _interruptible(task, options, known, options.limits, apart)
        if outcome.plan is None:
            outcome = _least_plan(task, outcome, options)
        if options.cache:
            PlanCache().store(key_of(task, options), outcome)
    return outcome


def _least_plan(task: Task, without: Outcome, options: Options) -> Outcome:
    """Return the plan of the least budget, if it fits where the default planner has found none.

    Where it is proven that none fits, the search for the least budget is short: callers search
    again with what they know of memory around the step.

    `without`: the outcome without a plan. Raises `InfeasibleBudget`.
    """
    limits = options.limits
    if without.status == "infeasible":
        limits = msgspec.structs.replace(limits, seconds=min(_LEAST_S, limits.seconds))
    least = minimum_budget(task.graph, task.gradients, limits, options.progress)
    if options.planner == DEFAULT and least.found_bytes <= task.budget_bytes:
        return judged(task, least.plan)
    raise infeasible(task, _with_far_needed(task, without, options), least)


def _with_far_needed(task: Task, without: Outcome, options: Options) -> Outcome:
    """Return an outcome without a plan, noting whether more far memory would help."""
    if task.far is None:
        return without
    ample = msgspec.structs.replace(task.far, capacity_bytes=_AMPLE_BYTES)
    limits = msgspec.structs.replace(options.limits, gap=_ANY_GAP)
    more = msgspec.structs.replace(task, far=ample)
    found = plan_with(options.planner, more, limits, options.progress)
    note = "more of it was not found to help"
    if found.plan is not None:
        size_bytes = simulate(task.graph, found.plan).far_peak_bytes
        enough = as_budget(int((1.0 + _FURTHER_FAR) * size_bytes))
        note = f'a plan fits with offload="{enough}"'
    return msgspec.structs.replace(without, note=note)


def _interruptible(
    task: Task, options: Options, known: Plan | None, limits: Limits, apart: bool = False
) -> Outcome:
    with Interrupts() as interrupts, _announcing(options, "searching a plan"):
        outcome = _searched(task, options, known, limits, apart)
    if interrupts.seen and options.stops_on_interrupt:
        _stop(task, options, outcome)
    return outcome


def _searched(
    task: Task, options: Options, known: Plan | None, limits: Limits, apart: bool
) -> Outcome:
    """Search a plan, or return the better plan of an earlier search that was interrupted."""
    before = None
    if options.cache:
        before = PlanCache().load(key_of(task, options, interrupted=True), task.graph)
    if before is not None:
        known = before.plan
    search = plan_apart if apart else plan_with
    outcome = search(options.planner, task, limits, options.progress, known=known)
    if before is not None and (outcome.plan is None or before.overhead < outcome.overhead):
        return before
    return outcome


def _stop(task: Task, options: Options, outcome: Outcome) -> NoReturn:
    """Keep the result of an interrupted search, and stop the program as the user asked."""
    found = "nothing was found yet"
    if outcome.plan is not None and options.cache:
        PlanCache().store(key_of(task, options, interrupted=True), outcome)
        found = "a second attempt starts from the plan that was found"
    elif outcome.plan is not None:
        found = "the plan that was found is not kept (cache=False)"
    raise KeyboardInterrupt(f"tightfit: planning was interrupted; {found}") from None


def _announcing(options: Options, label: str) -> AbstractContextManager[None]:
    """Return a context that announces long waiting, if no progress display does."""
    if options.progress is not SILENT:
        return contextlib.nullcontext()
    return said_while_waiting(lambda: label)


def in_groups(graph: Graph, outcome: Outcome, options: Options) -> Plan:
    """Return the plan of an outcome that hands over gradients in groups for which there is room.

    They take memory of their own until then, where others wait for them or nobody asks for them.
    """
    assert outcome.plan is not None
    spare_bytes = options.planned_bytes - outcome.peak_bytes
    group_bytes = max(spare_bytes // _SPARE_SHARE, graph.handed_over_bytes // _MOST_GROUPS, 1)
    if options.ranks is not None:  # another rank has made it; all send gradients early
        group_bytes = 1
    is_single = outcome.plan.gradients == "accumulated"  # each is handed over by itself anyway
    if is_single or group_bytes >= GROUP_BYTES:
        return outcome.plan
    plan = handing_over_in_groups(graph, outcome.plan, group_bytes)
    verify(plan, graph)
    return plan


def cached_outcome(task: Task, options: Options) -> Outcome | None:
    """Return the user's own plan, or the result of an earlier search for this task."""
    if options.plan is not None and options.plan.gradients == task.gradients:
        return judged(task, options.plan)
    return PlanCache().load(key_of(task, options), task.graph) if options.cache else None


def key_of(task: Task, options: Options, *, interrupted: bool = False) -> PlanKey:
    return plan_key(
        task.graph,
        budget_bytes=task.budget_bytes,
        gradients=task.gradients,
        planner=f"{options.planner}{', interrupted' * interrupted}",
        limits=options.limits,
        far=task.far,
    )
