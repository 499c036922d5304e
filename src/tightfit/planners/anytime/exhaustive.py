"""Small graphs are solved exactly: the cheapest path through sets of live values."""

from __future__ import annotations

from tightfit._core import _engine
from tightfit.plan.plan import Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.engine.problem import EngineProblem, computes_of
from tightfit.planners.outcomes import Bound, finish, no_plan

_MOST_VALUES = 22
_MOST_STATES = 400_000
EXHAUSTIVE = "exhaustive search"


def solve_small(
    task: Task, problem: EngineProblem, limits: Limits, started: float
) -> Outcome | None:
    """Return the optimum of a small problem or the proof that it has none; None if it is large.

    Here an op may also be computed twice between two first computations, which the engine's
    schedules do not contain.
    """
    if len(problem.sizes) > _MOST_VALUES or task.graph.choices:
        return None
    finished, feasible, cost, rows = _engine.solve_exhaustively(
        problem.engine, problem.budget_bytes, _MOST_STATES
    )
    if not finished:
        return None
    if not feasible:
        return no_plan(started=started, proven=True, bound_source=EXHAUSTIVE)
    computes = computes_of(problem, rows)
    bound = problem.overhead(cost) - 1e-9
    return finish(task, computes, bound=Bound(bound, EXHAUSTIVE), started=started, gap=limits.gap)
