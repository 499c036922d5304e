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
            summary="greedy plan, K-cut program, large-neighbourhood search, cutting planes",
            alternatives=True,
            proves_infeasible=True,
            moves=True,
        ),
        Registration(
            name="greedy",
            function="tightfit.planners.engine.greedy:plan_greedy",
            summary="relieve the fullest stage by the cheapest drop, then fill the room left",
        ),
        Registration(
            name="checkmate",
            function="tightfit.planners.papers.checkmate.planner:plan_checkmate",
            summary="Checkmate's integer program, cold; split: two stages per backward op (4.10)",
            options=("split",),
            exact=True,
            reference="Jain et al. (2020), Checkmate, section 4",
        ),
        Registration(
            name="checkmate+",
            function="tightfit.planners.papers.checkmate.planner:plan_checkmate_plus",
            summary="Checkmate's program from the default planner's plan, with its bound borrowed",
            exact=True,
            proves_infeasible=True,
            reference="Jain et al. (2020), Checkmate, section 4",
        ),
        Registration(
            name="checkmate_o",
            function="tightfit.planners.papers.checkmate.post_optimised:plan_checkmate_o",
            summary="Checkmate's plan, then greedily the implementations that make it cheaper",
            alternatives=True,
            reference="Shah et al. (2021), MONeT, section 6",
        ),
        Registration(
            name="checkmate_rounding",
            function="tightfit.planners.papers.checkmate.planner:plan_checkmate_rounding",
            summary="two-phase rounding of Checkmate's linear relaxation",
            reference="Jain et al. (2020), Checkmate, section 5 of v3",
        ),
        Registration(
            name="monet",
            function="tightfit.planners.papers.monet.planner:plan_monet",
            summary="MONeT's integer program, one implementation per op; loose: appendix B, first",
            options=("loose",),
            seeds_up_to=250,
            exact=True,
            reference="Shah et al. (2021), MONeT, section 4",
        ),
        Registration(
            name="monet_all",
            function="tightfit.planners.papers.monet.planner:plan_monet_all",
            summary="MONeT's integer program, which chooses implementations too",
            alternatives=True,
            exact=True,
            reference="Shah et al. (2021), MONeT, section 4",
        ),
        Registration(
            name="intervals",
            function="tightfit.planners.papers.intervals.planner:plan_intervals",
            summary="retention intervals on the constraint solver CP-SAT, two per value",
            exact=True,
            extra="cpsat",
            reference="Bartan et al. (2023), Moccasin",
        ),
        Registration(
            name="eviction",
            function="tightfit.planners.papers.eviction:plan_eviction",
            summary="evict by a policy (h_dtr) as an online runtime would",
            options=("h_dtr_eq", "h_dtr_local", "lru", "size", "msps"),
            seeds_up_to=_MOST_SEEDED,
            looks_at_budget=False,
            reference="Kirisame et al. (2021), DTR, section 4",
        ),
        Registration(
            name="gist",
            function="tightfit.planners.papers.gist:plan_gist",
            summary="nothing computed again: masks, sparse and half-precision storage, in place",
            alternatives=True,
            looks_at_budget=False,
            reference="Jain et al. (2018), Gist; Shah et al. (2021), MONeT, appendix E",
        ),
        Registration(
            name="griewank",
            function="tightfit.planners.papers.griewank:plan_griewank",
            summary="revolve: binomial checkpointing of a chain",
            linear_only=True,
            looks_at_budget=False,
            reference="Griewank and Walther (2000), algorithm 799",
        ),
        Registration(
            name="chen_sqrt",
            function="tightfit.planners.papers.chen:plan_chen_sqrt",
            summary="checkpoint every sqrt(n)-th op of a chain",
            linear_only=True,
            looks_at_budget=False,
            reference="Chen et al. (2016), section 4",
        ),
        Registration(
            name="chen_greedy",
            function="tightfit.planners.papers.chen:plan_chen_greedy",
            summary="checkpoint a chain in segments of equal bytes, with a search over their size",
            linear_only=True,
            looks_at_budget=False,
            reference="Chen et al. (2016), algorithm 3",
        ),
        Registration(
            name="ap_sqrt",
            function="tightfit.planners.papers.chen:plan_ap_sqrt",
            summary="checkpoint every sqrt(n)-th articulation point",
            seeds_up_to=_MOST_SEEDED,
            looks_at_budget=False,
            reference="Jain et al. (2020), section 5.1.1",
        ),
        Registration(
            name="ap_greedy",
            function="tightfit.planners.papers.chen:plan_ap_greedy",
            summary="checkpoint articulation points in segments of equal bytes",
            seeds_up_to=_MOST_SEEDED,
            looks_at_budget=False,
            reference="Jain et al. (2020), section 5.1.1",
        ),
        Registration(
            name="linearised_sqrt",
            function="tightfit.planners.papers.chen:plan_linearised_sqrt",
            summary="checkpoint every sqrt(n)-th op in topological order",
            seeds_up_to=_MOST_SEEDED,
            looks_at_budget=False,
            reference="Jain et al. (2020), section 5.1.2",
        ),
        Registration(
            name="linearised_greedy",
            function="tightfit.planners.papers.chen:plan_linearised_greedy",
            summary="checkpoint in segments of equal bytes in topological order",
            seeds_up_to=_MOST_SEEDED,
            looks_at_budget=False,
            reference="Jain et al. (2020), section 5.1.2",
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
