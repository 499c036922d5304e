"""Which values of another compiler's joint graph stay for its backward, within a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import fx

from tightfit.capture.foreign import lift_foreign
from tightfit.costs import with_costs
from tightfit.graph.ir import Device, Graph, ValueId
from tightfit.plan.plan import Compute, Enter, Free, HandOver, Outcome, Plan
from tightfit.planners.base import Limits, Task
from tightfit.planners.questions.infeasible import infeasible
from tightfit.planners.questions.minimum import minimum_budget
from tightfit.planners.registry import DEFAULT, plan_with
from tightfit.progress import SILENT
from tightfit.units import parse_bytes

_LIMITS = Limits(seconds=10.0, gap=0.005)


class Saving(NamedTuple):
    """Values that a forward saves for its backward, values recomputed there, and the plan."""

    saved: list[fx.Node]
    again: list[fx.Node]
    outcome: Outcome


def plan_saving(
    module: fx.GraphModule,
    budget: int | str,
    *,
    is_backward: Callable[[fx.Node], bool],
    is_tangent: Callable[[fx.Node], bool],
    device: str = "cpu",
) -> Saving:
    """Plan a joint graph: the values that its forward saves for its backward.

    `budget`: for the inputs of the graph, parameters among them, and for all values it makes. The
    optimizer's state and the workspace of the compiler's kernels are not in it. `device`: ``"cpu"``
    or ``"cuda"``: how sizes are rounded. `module`, `is_backward`, `is_tangent`: as
    `tightfit.capture.foreign.lift_foreign` takes them. Raises `InfeasibleBudget` if no plan fits;
    says the least budget. Raises `CaptureError` if sizes are symbols.
    """
    where = Device(kind=device, granularity_bytes=512 if device == "cuda" else 64)
    found = lift_foreign(module, is_backward, is_tangent, where)
    graph = with_costs(found.graph, "cpu")
    task = Task(graph=graph, budget_bytes=parse_bytes(budget))
    outcome = plan_with(DEFAULT, task, _LIMITS, SILENT)
    if outcome.plan is None:
        least = minimum_budget(task.graph, task.gradients, _LIMITS, SILENT)
        raise infeasible(task, outcome, least)
    alive = _alive_between(outcome.plan, graph)
    backward = [node for node in module.graph.nodes if is_backward(node)]
    return Saving(*found.split(alive, backward), outcome)


def _alive_between(plan: Plan, graph: Graph) -> frozenset[ValueId]:
    """Return the values that are alive when the backward begins."""
    alive: set[ValueId] = set()
    for step in plan.instructions:
        if isinstance(step, Compute):
            alive.update(step.alternative_in(graph).writes)
        elif isinstance(step, Free):
            alive.discard(step.value)
        elif isinstance(step, HandOver):
            alive.difference_update(step.values)
        elif isinstance(step, Enter) and step.segment > 0:
            break
    return frozenset(alive)
