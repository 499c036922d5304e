"""The same problem with fewer alternatives: its plan is a seed for the whole search."""

from __future__ import annotations

from collections.abc import Sequence

from tightfit.graph.ir import EXACTNESS, Exactness
from tightfit.planners.base import Task
from tightfit.planners.engine.build import build_problem
from tightfit.planners.engine.problem import EngineProblem


def narrower_problem(task: Task, problem: EngineProblem) -> EngineProblem | None:
    """Return the problem whose first computations are of the next stricter class that occurs.

    Behind the strictest one come the defaults only; None behind these.
    """
    if problem.exactness is None:
        return None
    ways = (way for op in task.graph.ops for way in op.alternatives if way.use != "again")
    used = {way.exactness for way in ways}
    allowed = EXACTNESS[: EXACTNESS.index(problem.exactness) + 1]
    occurring: list[Exactness] = [name for name in allowed if name in used]
    if len(occurring) < 2:
        return build_problem(task, alternatives=False)
    return build_problem(task, exactness=occurring[-2])


def choices_in(
    wider: EngineProblem, narrower: EngineProblem, choices: Sequence[int]
) -> list[int] | None:
    """Return chosen first alternatives of the narrower problem in the wider one's numbers.

    None if a way is not found there, or values are numbered differently.
    """
    if (wider.sizes, wider.producers) != (narrower.sizes, narrower.producers):
        return None
    found: list[int] = []
    for ways, own, choice in zip(wider.alternatives, narrower.alternatives, choices, strict=True):
        wanted = own[choice]
        for number, way in enumerate(ways):
            alike = set(way.reads) == set(wanted.reads) and way.writes == wanted.writes
            if way.first and alike:
                found.append(number)
                break
        else:
            return None
    return found
