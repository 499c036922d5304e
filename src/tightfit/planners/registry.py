"""The table of planners: adding one is a file plus an entry here."""

from __future__ import annotations

import contextlib

import msgspec

from tightfit.errors import BadInput, InvalidPlan
from tightfit.graph.ir import Graph
from tightfit.plan.plan import Outcome, Plan
from tightfit.planners.base import Limits, Registration, Task
from tightfit.planners.outcomes import judged
from tightfit.progress import SILENT, Progress

DEFAULT = "anytime"

_MOST_SEEDED = 1500  # ops up to which quick methods give the default planner a start

PLANNERS: dict[str, Registration] = {
    entry.name: entry
    for entry in (
        Registration(
            name="anytime",
            function="tightfit.planners.moves.planner:plan_with_moves",
            alternatives=True,
            proves_infeasible=True,
            moves=True,
        ),
        Registration(
            name="greedy",
            function="tightfit.planners.engine.greedy:plan_greedy",
        ),
        Registration(
            name="checkmate",
            function="tightfit.planners.papers.checkmate.planner:plan_checkmate",
            options=("split",),
            exact=True,
        ),
        Registration(
            name="checkmate+",
            function="tightfit.planners.papers.checkmate.planner:plan_checkmate_plus",
            exact=True,
            proves_infeasible=True,
        ),
        Registration(
            name="checkmate_o",
            function="tightfit.planners.papers.checkmate.post_optimised:plan_checkmate_o",
            alternatives=True,
        ),
        Registration(
            name="checkmate_rounding",
            function="tightfit.planners.papers.checkmate.planner:plan_checkmate_rounding",
        ),
        Registration(
            name="monet",
            function="tightfit.planners.papers.monet.planner:plan_monet",
            options=("loose",),
            seeds_up_to=250,
            exact=True,
        ),
        Registration(
            name="monet_all",
            function="tightfit.planners.papers.monet.planner:plan_monet_all",
            alternatives=True,
            exact=True,
        ),
        Registration(
            name="intervals",
            function="tightfit.planners.papers.intervals.planner:plan_intervals",
            exact=True,
            extra="cpsat",
        ),
        Registration(
            name="eviction",
            function="tightfit.planners.papers.eviction:plan_eviction",
            options=("h_dtr_eq", "h_dtr_local", "lru", "size", "msps"),
            seeds_up_to=_MOST_SEEDED,
            looks_at_budget=False,
        ),
        Registration(
            name="gist",
            function="tightfit.planners.papers.gist:plan_gist",
            alternatives=True,
            looks_at_budget=False,
        ),
        Registration(
            name="griewank",
            function="tightfit.planners.papers.griewank:plan_griewank",
            linear_only=True,
            looks_at_budget=False,
        ),
        Registration(
            name="chen_sqrt",
            function="tightfit.planners.papers.chen:plan_chen_sqrt",
            linear_only=True,
            looks_at_budget=False,
        ),
        Registration(
            name="chen_greedy",
            function="tightfit.planners.papers.chen:plan_chen_greedy",
            linear_only=True,
            looks_at_budget=False,
        ),
        Registration(
            name="ap_sqrt",
            function="tightfit.planners.papers.chen:plan_ap_sqrt",
            seeds_up_to=_MOST_SEEDED,
            looks_at_budget=False,
        ),
        Registration(
            name="ap_greedy",
            function="tightfit.planners.papers.chen:plan_ap_greedy",
            seeds_up_to=_MOST_SEEDED,
            looks_at_budget=False,
        ),
        Registration(
            name="linearised_sqrt",
            function="tightfit.planners.papers.chen:plan_linearised_sqrt",
            seeds_up_to=_MOST_SEEDED,
            looks_at_budget=False,
        ),
        Registration(
            name="linearised_greedy",
            function="tightfit.planners.papers.chen:plan_linearised_greedy",
            seeds_up_to=_MOST_SEEDED,
            looks_at_budget=False,
        ),
    )
}


def find_planner(name: str) -> Registration:
    """Return the planner of a name, or of a name with an option such as ``"eviction:lru"``.

    Raises `BadInput` for an unknown name or option; lists the known ones.
    """
    planner, has_option, option = name.partition(":")
    entry = PLANNERS.get(planner)
    if entry is None:
        raise BadInput(f"no planner is called {planner!r} (known: {', '.join(sorted(PLANNERS))})")
    if has_option and option not in entry.options:
        known = ", ".join(f"{planner}:{option}" for option in entry.options) or "none"
        raise BadInput(f"planner {planner!r} has no option {option!r} (known: {known})")
    return msgspec.structs.replace(entry, name=name, option=option)


def seeding_planners(ops: int) -> tuple[Registration, ...]:
    """Return the planners whose plans a search on a graph of so many ops may start from."""
    return tuple(entry for entry in PLANNERS.values() if ops <= entry.seeds_up_to)


def is_chain(graph: Graph) -> bool:
    """Whether the forward ops form a chain: each reads only the values of the previous op.

    Ops that only count steps (they read constants and write one back) are left out.
    """
    previous: frozenset[int] = frozenset()
    for op in graph.ops:
        if graph.segments[op.segment].phase != "forward" or not op.required:
            continue
        reads = {v for v in op.alternatives[0].reads if not graph.values[v].is_constant}
        if not reads <= previous:
            return False
        writes = op.alternatives[0].writes
        if reads or any(graph.values[v].fate != "written_back" for v in writes):
            previous = frozenset(writes)
    return True


def plan_with(
    name: str,
    task: Task,
    limits: Limits | None = None,
    progress: Progress = SILENT,
    known: Plan | None = None,
) -> Outcome:
    """Run a planner on a task after checking that it can plan the task.

    `known`: an earlier plan of this step, of any budget; used if it fits and the planner finds
    none. Raises `BadInput` if the planner is unknown, or plans chains only and the graph is none,
    or moves nothing and the task has far memory. Raises `MissingExtra` if it needs a package that
    is not installed.
    """
    entry = find_planner(name)
    if entry.linear_only and not is_chain(task.graph):
        raise BadInput(
            f"planner {name!r} plans chains only and the forward part of "
            f"{task.graph.name or 'this graph'!r} is no chain; planners without this limit: "
            + ", ".join(n for n, r in PLANNERS.items() if not r.linear_only)
        )
    if task.far is not None and not entry.moves:
        raise BadInput(
            f"planner {name!r} moves nothing to far memory; planners that do: "
            + ", ".join(n for n, r in PLANNERS.items() if r.moves)
        )
    outcome = entry.load()(task, limits or Limits(), progress)
    if outcome.plan is None and outcome.status != "infeasible" and known is not None:
        with contextlib.suppress(InvalidPlan):
            return judged(task, known, bound=outcome.bound, bound_source=outcome.bound_source)
    return outcome
