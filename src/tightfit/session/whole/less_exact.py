"""The gain of the next, less exact class of alternatives: planned on request."""

from __future__ import annotations

from tightfit.errors import BadInput
from tightfit.execution.guard import left_out
from tightfit.plan.less_exact import LessExact, less_exact_than
from tightfit.planners.registry import plan_with
from tightfit.session.stages import less_exact_step
from tightfit.session.whole.specialisation import Planned, Specialisation
from tightfit.session.whole.steps import WholeSteps


def planned_less_exactly(whole: WholeSteps) -> LessExact:
    """Return the cost of a plan with the next class, within the budget of the last step.

    The plan is searched with the limits of the user and not used. Alternatives that were not
    measured yet are measured within the budget.

    Raises `BadInput` if there is no less exact class, a step is running, plans are compiled, or
    the last plan is not in use any more.
    """
    options = whole.options
    exactness = less_exact_than(options.exactness)
    if exactness is None:
        raise BadInput(f"next_exactness: no class is less exact than {options.exactness}")
    if options.compile:
        raise BadInput("next_exactness: compiled plans are chosen by trial runs, not by a search")
    if whole.waiting:
        raise BadInput("next_exactness: a step awaits its backward; ask between two steps")
    spec, planned = _last(whole)
    surroundings = spec.made_for(planned)
    assert surroundings is not None
    whole.account.enforce()
    try:
        room_bytes = surroundings.budget_bytes - planned.graph.constant_bytes
        with left_out():
            wider = less_exact_step(
                spec.captured, exactness, options, whole.callee.modules, room_bytes
            )
    finally:
        whole.account.rest()
    outcome = plan_with(options.planner, surroundings.task(wider), options.limits, options.progress)
    return LessExact.of(exactness, outcome, planned.outcome.overhead)


def _last(whole: WholeSteps) -> tuple[Specialisation, Planned]:
    last = whole.last
    for spec in whole.captures:
        if last is not None and spec.has(last):
            return spec, last
    raise BadInput("next_exactness: no plan is in use; run a step or tightfit.prepare first")
