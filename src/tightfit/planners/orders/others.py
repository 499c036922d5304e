"""The orders of first computations, other than the traced order, in which plans are looked for."""

from __future__ import annotations

from tightfit.graph.ir import Graph, OpId
from tightfit.plan.assemble import keep_everything
from tightfit.plan.plan import Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.orders.frees_early import frees_early
from tightfit.planners.orders.least_peak import LeastPeak, least_peak
from tightfit.planners.outcomes import finish, simulated

MOST_ORDERED = 10_000  # ops of graphs for which it is tried whether another order fits
MOST_SEARCHED = 3000  # ops of graphs for which plans are searched in other orders
_MOST_SECONDS = 1.0
_SHARE = 0.05  # of the time, for local moves


def other_orders(graph: Graph, least: LeastPeak | None) -> dict[tuple[OpId, ...], str]:
    """Return the names of the other orders that plans of a graph may take.

    `least`: the order that needs the least memory with nothing recomputed, if it was looked for.
    """
    others = {} if least is None else {least.ops: "least memory"}
    if len(graph.ops) <= MOST_SEARCHED:
        others[frees_early(graph)] = "frees early"
    others.pop(tuple(range(len(graph.ops))), None)
    return others


def order_for(task: Task, limits: Limits) -> LeastPeak:
    """Return an order whose peak with nothing recomputed is in the budget, or low."""
    counts = limits.iterations is not None
    seconds = None if counts else min(_MOST_SECONDS, _SHARE * limits.seconds)
    return least_peak(task, enough_bytes=task.budget_bytes, seconds=seconds, seed=limits.seed)


def order_only(task: Task, order: LeastPeak, limits: Limits, started: float) -> Outcome | None:
    """Return the outcome of an order in which nothing is recomputed, or None if it does not fit.

    It is optimal in any order, unless alternatives are faster than the defaults.
    """
    place = {op: position for position, op in enumerate(order.ops)}
    computes = sorted(keep_everything(task.graph), key=lambda step: place[step.op])
    if simulated(task, computes).peak_bytes > task.budget_bytes:
        return None
    note = "order only: nothing is recomputed, ops run in another order than the traced one"
    return finish(task, computes, started=started, gap=limits.gap, note=note)
