"""Where every planner ends: a verified outcome, or none."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from tightfit.errors import InvalidPlan, PlanMismatch
from tightfit.plan.assemble import Step, assemble
from tightfit.plan.plan import Outcome, Plan, Status, Store
from tightfit.plan.simulate import Simulation, simulate
from tightfit.plan.verify import verify
from tightfit.planners.base import Limits, Task
from tightfit.planners.bounds import least_overhead

NO_PLAN_HERE = "proven: no plan in its own search space"
"""Note of an outcome whose program is infeasible: no proof for plans outside that space."""

_ROUNDING = 1e-4  # may be added to a bound by a solver's tolerances


@dataclass(frozen=True)
class Bound:
    """A proven lower bound on the overhead (a fraction), and how it was proven.

    `overhead`: None: only the ops that must run anyway.
    """

    overhead: float | None
    source: str


_TRIVIAL = Bound(None, "trivial")


def finish(
    task: Task,
    steps: Sequence[Step],
    *,
    bound: Bound = _TRIVIAL,
    started: float,
    gap: float = 1e-4,
    note: str = "",
) -> Outcome:
    """Assemble, verify and price a planner's computes, and its moves.

    `steps`: the schedule found. `bound`: withdrawn if the plan is cheaper. `started`:
    `time.perf_counter` at the start of planning. Raises `InvalidPlan` if the verifier refuses the
    plan: a bug of the planner.
    """
    plan = plan_of(task, steps)
    verify(plan, task.graph)
    result = simulate(task.graph, plan)
    least = least_overhead(task.graph)
    proven, source = least if bound.overhead is None else bound.overhead, bound.source
    if proven > result.overhead + _ROUNDING:
        # a number above a plan's is no bound: say so instead of calling the plan optimal
        note = f"{note}; the bound of {source} was wrong and is withdrawn".lstrip("; ")
        proven, source = least, "withdrawn"
    seconds = time.perf_counter() - started
    return _outcome(plan, result, Bound(proven, source), gap, seconds=seconds, note=note)


def _outcome(
    plan: Plan, result: Simulation, bound: Bound, gap: float, *, seconds: float, note: str = ""
) -> Outcome:
    """Return a verified plan as an outcome; no bound on it is above its own overhead."""
    assert bound.overhead is not None
    proven = min(bound.overhead, result.overhead)
    return Outcome(
        plan=plan,
        overhead=result.overhead,
        bound=proven,
        bound_source=bound.source,
        status=status_of(result.overhead, proven, gap),
        seconds=seconds,
        peak_bytes=result.peak_bytes,
        note=note,
    )


def no_plan(
    *,
    started: float,
    proven: bool,
    bound: float = 0.0,
    bound_source: str = "trivial",
    note: str = "",
) -> Outcome:
    """Return the outcome of a search that ended without a plan."""
    return Outcome(
        plan=None,
        overhead=math.inf,
        bound=math.inf if proven else bound,
        bound_source=bound_source,
        status="infeasible" if proven else "unknown",
        seconds=time.perf_counter() - started,
        note=note,
    )


def simulated(task: Task, steps: Sequence[Step]) -> Simulation:
    """Return the real bytes and seconds of a schedule."""
    return simulate(task.graph, plan_of(task, steps))


def plan_of(task: Task, steps: Sequence[Step]) -> Plan:
    """Return a schedule as a plan for a task's budget, not verified."""
    return assemble(
        task.graph,
        steps,
        budget_bytes=task.budget_bytes,
        gradients=task.gradients,
        far=task.far if any(isinstance(step, Store) for step in steps) else None,
    )


def judged(
    task: Task, plan: Plan, *, bound: float | None = None, bound_source: str = "given"
) -> Outcome:
    """Verify a plan of unknown quality against its graph; return its outcome.

    `bound`: a proven lower bound on the overhead (a fraction) at this budget; by default only the
    ops that must run anyway. Raises `InvalidPlan` or `PlanMismatch` if it does not fit the graph or
    the budget.
    """
    far = None if plan.far is None else task.far
    plan = msgspec.structs.replace(plan, budget_bytes=task.budget_bytes, far=far)
    verify(plan, task.graph)
    proven = Bound(least_overhead(task.graph) if bound is None else bound, bound_source)
    return _outcome(plan, simulate(task.graph, plan), proven, Limits().gap, seconds=0.0)


def status_of(overhead: float, bound: float, gap: float) -> Status:
    return "optimal" if overhead - bound <= gap else "feasible"


def valid_outcomes(task: Task, plans: Iterable[Plan]) -> list[Outcome]:
    """Return the outcomes of the plans that are valid for a task and fit."""
    found: list[Outcome] = []
    for plan in plans:
        if plan.gradients == task.gradients:
            with contextlib.suppress(InvalidPlan, PlanMismatch):
                found.append(judged(task, plan))
    return found
