"""Plans whose layout is within the budget: plan, lay out, and plan again with less if it is not."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tightfit.graph.ir import Graph
from tightfit.layout.pack import pack_plan
from tightfit.plan.plan import Outcome, Plan
from tightfit.planners.base import Task
from tightfit.units import format_bytes

_ROUNDS = 3


def height_of_plan(graph: Graph, plan: Plan) -> int:
    """Return the bytes of constants and of a plan's layout, sizes rounded as its device does."""
    return graph.constant_bytes + pack_plan(graph, plan).height_bytes


def plan_within(
    task: Task,
    planned: Callable[[Task], Outcome],
    height_of: Callable[[Graph, Plan], int] = height_of_plan,
) -> tuple[Outcome, int | None]:
    """Plan so that the layout is within the budget; return its height as well, if there is a plan.

    Where the height of a plan exceeds the budget by some bytes, the next round's budget is the
    plan's peak less these bytes. There are at most three rounds. If no round keeps the budget,
    returns the last plan found, and the outcome's note says by how much it is exceeded.

    `task`: its budget is for everything. `height_of`: returns the height of a plan in bytes,
    constants included.
    """
    budget_bytes = task.budget_bytes
    found: tuple[Outcome, int] | None = None
    for _ in range(_ROUNDS):
        outcome = planned(msgspec.structs.replace(task, budget_bytes=budget_bytes))
        if outcome.plan is None:
            if found is None:
                return outcome, None
            break
        height_bytes = height_of(task.graph, outcome.plan)
        if height_bytes <= task.budget_bytes:
            return outcome, height_bytes
        found = outcome, height_bytes
        budget_bytes = min(budget_bytes, outcome.peak_bytes) - (height_bytes - task.budget_bytes)
    assert found is not None
    outcome, height_bytes = found
    excess = format_bytes(height_bytes - task.budget_bytes)
    note = f"laid out, it takes {excess} more than the budget of {format_bytes(task.budget_bytes)}"
    note = f"{outcome.note}; {note}" if outcome.note else note
    return msgspec.structs.replace(outcome, note=note), height_bytes
