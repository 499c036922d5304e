"""The table of planners: adding one is a file plus an entry here."""

from __future__ import annotations

from tightfit.errors import BadInput
from tightfit.graph.ir import Graph
from tightfit.plan.plan import Outcome
from tightfit.planners.base import Capabilities, Limits, Registration, Task
from tightfit.progress import SILENT, Progress

__all__ = ["DEFAULT", "PLANNERS", "find_planner", "plan_with"]

DEFAULT = "anytime"

PLANNERS: dict[str, Registration] = {
    entry.name: entry
    for entry in (
        Registration(
            name="anytime",
            function="tightfit.planners.anytime.pipeline:plan_anytime",
            summary="greedy plan, K-cut program, large-neighbourhood search, cutting planes",
            capabilities=Capabilities(alternatives=True, proves_infeasible=True),
        ),
        Registration(
            name="greedy",
            function="tightfit.planners.greedy:plan_greedy",
            summary="relieve the fullest stage by the cheapest drop, then fill what room is left",
            capabilities=Capabilities(alternatives=False),
        ),
    )
}


def find_planner(name: str) -> Registration:
    """Return the planner of that name.

    Raises
    ------
    BadInput
        For an unknown name; lists the known ones.
    """
    if name not in PLANNERS:
        raise BadInput(f"no planner is called {name!r} (known: {', '.join(sorted(PLANNERS))})")
    return PLANNERS[name]


def is_chain(graph: Graph) -> bool:
    """Whether the forward ops form a chain: each reads only the values of the one before."""
    previous: frozenset[int] = frozenset()
    for op in graph.ops:
        if graph.segments[op.segment].phase != "forward" or not op.required:
            continue
        reads = {v for v in op.alternatives[0].reads if not graph.values[v].is_constant}
        if not reads <= previous:
            return False
        previous = frozenset(op.alternatives[0].writes)
    return True


def plan_with(
    name: str, task: Task, limits: Limits | None = None, progress: Progress = SILENT
) -> Outcome:
    """Run the planner of that name on a task after checking that it can do it.

    Raises
    ------
    BadInput
        If the planner is unknown, or plans chains only and the graph is none.
    MissingExtra
        If it needs a package that is not installed.
    """
    entry = find_planner(name)
    if entry.capabilities.linear_only and not is_chain(task.graph):
        raise BadInput(
            f"planner {name!r} plans chains only and the forward part of "
            f"{task.graph.name or 'this graph'!r} is no chain; planners without this limit: "
            + ", ".join(n for n, r in PLANNERS.items() if not r.capabilities.linear_only)
        )
    return entry.load()(task, limits or Limits(), progress)
