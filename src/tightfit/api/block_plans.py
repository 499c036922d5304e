"""Plans of one block of a model, from the least memory to the least extra compute.

Blocks are planned one by one where the whole cannot be: each plan says what it adds to what is
held when it starts, so that blocks can be put together in whatever order they are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tightfit.api.options import Options
from tightfit.api.pipeline import plan_step, with_outside
from tightfit.capture.lift import Captured
from tightfit.errors import InfeasibleBudget
from tightfit.execution.lower import lower
from tightfit.execution.runtime import Runner
from tightfit.graph.ir import Graph
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan.plan import Enter, Gradients, Plan
from tightfit.plan.simulate import simulate
from tightfit.planners.minimum import minimum_budget

__all__ = [
    "LEVELS",
    "BlockPlan",
    "Called",
    "best_level",
    "block_plan",
    "plans_of_levels",
    "predicted_peak",
]

LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""How far a plan's budget lies between the smallest and that of keeping everything."""


@dataclass(frozen=True)
class BlockPlan:
    """A plan of one block, and what it adds to what is held when it starts.

    Parameters
    ----------
    runner : Runner
        Runs it.
    forward_bytes, saved_bytes : int
        The most while its forward runs, and what stays for backward, its outputs included.
    backward_bytes : int
        The most while its backward runs, on top of what stayed; its gradients included.
    cost_s, baseline_cost_s : float
        Seconds, and with nothing recomputed.
    """

    runner: Runner
    forward_bytes: int
    saved_bytes: int
    backward_bytes: int
    cost_s: float
    baseline_cost_s: float


def plans_of_levels(plain: Graph, gradients: Gradients, options: Options) -> list[Plan]:
    """Return a verified plan for each level; the same one where more memory gains nothing."""
    eager = eager_peak_bytes(plain, gradients=gradients)
    # half the block's activations weigh on the boundary: what it saves counts for every block
    graph = with_outside(plain, (eager - plain.constant_bytes) // 2)
    least = minimum_budget(graph, gradients, options.limits, options.progress)
    most = max(eager_peak_bytes(graph, gradients=gradients), least.found_bytes)
    plans = [least.plan]
    cost_s = simulate(graph, least.plan).cost_s
    for level in LEVELS[1:]:
        budget = least.found_bytes + int(level * (most - least.found_bytes))
        try:
            outcome = plan_step(graph, budget, gradients, options)
        except InfeasibleBudget:
            plans.append(plans[-1])
            continue
        assert outcome.plan is not None
        before_s, cost_s = cost_s, min(cost_s, simulate(graph, outcome.plan).cost_s)
        plans.append(outcome.plan if cost_s < before_s else plans[-1])
    return plans


def block_plan(captured: Captured, plan: Plan) -> BlockPlan:
    """Lower one plan of a block, and say what it adds to what is held when it starts."""
    graph = captured.graph
    result = simulate(graph, plan)
    crossing = next(
        i for i, step in enumerate(plan.instructions) if isinstance(step, Enter) and step.segment
    )
    base = graph.constant_bytes
    saved = (result.after_bytes[crossing - 1] if crossing else base) - base
    return BlockPlan(
        runner=Runner(captured, lower(captured, plan)),
        forward_bytes=max(result.during_bytes[:crossing], default=base) - base,
        saved_bytes=saved,
        backward_bytes=max(result.during_bytes[crossing:]) - base - saved,
        cost_s=result.cost_s,
        baseline_cost_s=result.baseline_cost_s,
    )


class Called(msgspec.Struct):
    """One call of a block in a step.

    Parameters
    ----------
    name : str
        The block's name.
    plans : list of BlockPlan
        Its plans.
    level : int
        Which of them ran.
    held_bytes : int
        What was held when its forward started.
    gradient_bytes : int
        New gradients of its parameters.
    """

    name: str
    plans: list[BlockPlan]
    level: int
    held_bytes: int
    gradient_bytes: int

    @property
    def plan(self) -> BlockPlan:
        """The plan that ran."""
        return self.plans[self.level]


def predicted_peak(calls: Sequence[Called], level: int, later_gradient_bytes: int) -> int:
    """Return the most that a step of these calls holds if all run at a level.

    Parameters
    ----------
    later_gradient_bytes : int
        New gradients of what is no block; they may all exist when the first backward starts.
    """
    peak = shift = 0
    after = later_gradient_bytes + sum(call.gradient_bytes for call in calls)
    for call in calls:
        plan = call.plans[level]
        held = call.held_bytes + shift
        after -= call.gradient_bytes
        backward = held + plan.saved_bytes + after + plan.backward_bytes
        peak = max(peak, held + plan.forward_bytes, backward)
        shift += plan.saved_bytes - call.plan.saved_bytes
    return peak


def best_level(
    calls: Sequence[Called], later_gradient_bytes: int, measured_bytes: int, budget_bytes: int
) -> int:
    """Return the highest level at which the calls of a measured step would fit the budget.

    What the step held beyond the prediction for it lies outside the blocks, and is added.
    """
    ran = calls[0].level if calls else 0
    beside = max(0, measured_bytes - predicted_peak(calls, ran, later_gradient_bytes))
    fitting = [
        level
        for level in range(len(LEVELS))
        if predicted_peak(calls, level, later_gradient_bytes) + beside <= budget_bytes
    ]
    return max(fitting, default=0)
