"""Plans of a step that are kept on disk for the next process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from tightfit.files import cache_folder
from tightfit.graph.ir import Graph
from tightfit.plan.cache import PlanCache, PlanKey, role_key
from tightfit.plan.plan import Gradients, Outcome, Plan
from tightfit.planners.questions.minimum import MinimumBudget
from tightfit.session.options import Options

Role = Literal["first", "last", "least", "thrifty"]
"""Which plan of a step: the first or last by which it ran, that of the least budget, or the plan
that keeps least between forward and backward."""
_NO_COST = -1.0  # the overhead of a plan that takes no time at all
_RAN_ROLES: tuple[Role, ...] = ("last", "first")


def store_plan(graph: Graph, role: Role, outcome: Outcome, options: Options) -> None:
    """Keep a plan on disk, in place of the plan that had its role before."""
    if outcome.plan is not None and _is_enforced(options):
        _cache().store(_key(graph, role, outcome.plan.gradients, options), outcome)


def store_least_plan(graph: Graph, role: Role, least: MinimumBudget, options: Options) -> None:
    """Keep the plan of a least budget, which was verified where it was found."""
    outcome = Outcome(
        plan=least.plan,
        overhead=least.overhead,
        bound=_NO_COST,
        bound_source="trivial",
        status="feasible",
        seconds=least.seconds,
        peak_bytes=least.found_bytes,
    )
    store_plan(graph, role, outcome, options)


def earlier_plan(graph: Graph, role: Role, gradients: Gradients, options: Options) -> Plan | None:
    """Return the plan that had a role in an earlier process; it is not verified."""
    if not _is_enforced(options):
        return None
    return _cache().recall(_key(graph, role, gradients, options))


def earlier_plans(graph: Graph, options: Options) -> Iterator[Plan]:
    """Yield the plans by which an earlier process ran a step; they are not verified."""
    for gradients in get_args(Gradients):
        for role in _RAN_ROLES:
            plan = earlier_plan(graph, role, gradients, options)
            if plan is not None:
                yield plan


def _cache() -> PlanCache:
    """Return the cache of these plans, in another folder than results of searches."""
    return PlanCache(cache_folder("earlier"))


def _is_enforced(options: Options) -> bool:
    return options.searches_by_default and options.cache


def _key(graph: Graph, role: Role, gradients: Gradients, options: Options) -> PlanKey:
    budget_bytes, name = (
        (options.budget_bytes, str(role)) if role in _RAN_ROLES else (None, str(role))
    )
    if options.offload is not None and role in _RAN_ROLES:
        name += f", offload {options.offload.size_bytes}"
    return role_key(graph, role=name, gradients=gradients, budget_bytes=budget_bytes)
