"""Plans whose layout is within the budget: plan, lay out, and plan again with less if it is not."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tightfit.graph.ir import Graph
from tightfit.layout.of_plan import blocks_of_plan
from tightfit.layout.pack import pack
from tightfit.plan.plan import Outcome, Plan
from tightfit.planners.base import Task
from tightfit.units import format_bytes

__all__ = ["LaidOut", "height_of_plan", "plan_within"]

_ROUNDS = 3


class LaidOut(msgspec.Struct, frozen=True, kw_only=True):
    """A plan and memory of the process for it."""

    outcome: Outcome  # of the last round; its plan keeps the budget of that round
    # Bytes of the plan with an address for every byte, constants included; None without a plan
    height_bytes: int | None
    outside_bytes: int  # outside the arena, counted as well
    rounds: int  # how often it was planned

    @property
    def held_bytes(self) -> int:
        """Everything together; 0 without a plan."""
        return 0 if self.height_bytes is None else self.height_bytes + self.outside_bytes


def height_of_plan(graph: Graph, plan: Plan) -> int:
    """Return the bytes of constants and of a plan's layout, sizes rounded as its device does."""
    alignment_bytes = max(1, graph.device.granularity_bytes)
    blocks = blocks_of_plan(graph, plan)
    return graph.constant_bytes + pack(blocks, alignment_bytes=alignment_bytes).height_bytes


def plan_within(
    task: Task,
    planned: Callable[[Task], Outcome],
    *,
    outside_bytes: int = 0,
    height_of: Callable[[Plan], int] | None = None,
) -> LaidOut:
    """Plan so that the layout, and memory outside of it, are within the budget.

    The first round plans with the budget less bytes outside. Where the height of its plan exceeds
    that, the next round plans with as much less than the last plan's peak; there are three rounds
    at most.

    `task`: the problem; its budget is for everything. `outside_bytes`: other memory of the process,
    such as workspaces that libraries take for themselves. `height_of`: returns the height of a plan
    in bytes, constants included, for instance of a recorded step; by default that of the plan's own
    layout. If no round keeps the budget, returns the last plan found, and the outcome's note says
    by how much it is exceeded.
    """
    height_of = height_of or (lambda plan: height_of_plan(task.graph, plan))
    room_bytes = task.budget_bytes - outside_bytes
    budget_bytes = room_bytes
    found: LaidOut | None = None
    for number in range(1, _ROUNDS + 1):
        outcome = planned(msgspec.structs.replace(task, budget_bytes=budget_bytes))
        plan = outcome.plan
        if plan is None and found is not None:
            break
        height_bytes = None if plan is None else height_of(plan)
        found = LaidOut(
            outcome=outcome, height_bytes=height_bytes, outside_bytes=outside_bytes, rounds=number
        )
        if height_bytes is None or height_bytes <= room_bytes:
            return found
        budget_bytes = min(budget_bytes, outcome.peak_bytes) - (height_bytes - room_bytes)
    assert found is not None
    return _over(found, task)


def _over(found: LaidOut, task: Task) -> LaidOut:
    """Say by how much the last plan exceeds the budget once it is laid out."""
    excess = format_bytes(found.held_bytes - task.budget_bytes)
    note = f"laid out, it takes {excess} more than the budget of {format_bytes(task.budget_bytes)}"
    if found.outcome.note:
        note = f"{found.outcome.note}; {note}"
    return msgspec.structs.replace(found, outcome=msgspec.structs.replace(found.outcome, note=note))
