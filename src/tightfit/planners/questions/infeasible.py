"""The message where no plan fits a budget: why, the least budget, and what to try."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tightfit.errors import InfeasibleBudget, no_plan_fits
from tightfit.graph.ir import Graph
from tightfit.graph.liveness import producers
from tightfit.graph.names import holder_module, name_op
from tightfit.plan.plan import Compute, Outcome, Plan
from tightfit.plan.simulate import Simulation, simulate
from tightfit.planners.base import Task
from tightfit.planners.questions.minimum import MinimumBudget
from tightfit.units import as_budget, format_bytes

_MODULES_SHOWN = 4
_NEARLY_ALL = 0.95
_WORTH_NAMING = 0.05
_GRADIENTS = "gradients of parameters"


@dataclass(frozen=True)
class Expected:
    """The least budget of a step with the memory that is expected around it."""

    graph: Graph  # the step with that memory
    plan: Plan  # its least plan there
    found_bytes: int  # the budget of that plan
    held_bytes: Mapping[str, int]  # expected bytes other than the step's, by holder
    # No plan needs less, even without that memory; None: `MinimumBudget.lower_bytes` holds
    proven_bytes: int | None
    needed_bytes: int  # the budget to try: steps to come may need more


class NoPlan(InfeasibleBudget):
    """No plan of a task fits.

    `task`, `outcome`, `least`: as for `infeasible_message`.
    """

    def __init__(self, task: Task, outcome: Outcome, least: MinimumBudget) -> None:
        super().__init__(
            infeasible_message(task, outcome, least),
            budget_bytes=task.budget_bytes if task.whole_bytes is None else task.whole_bytes,
            minimum_bytes=_least_whole(task, least),
            proven=outcome.status == "infeasible",
        )
        self.task = task
        self.outcome = outcome
        self.least = least


def infeasible_message(
    task: Task, outcome: Outcome, least: MinimumBudget, expected: Expected | None = None
) -> str:
    """Return the budget asked for, the least, live values at the tightest instant, and ways out.

    `outcome`: the planner's answer for the budget that was asked for: without a plan. `least`: the
    least budget of the same graph. `expected`: the least budget with the memory that later steps of
    its kind will meet; None: as `least`.
    """
    is_proven, proven_bytes = outcome.status == "infeasible", least.lower_bytes
    if expected is None:
        needed_bytes = _least_whole(task, least)
        expected = Expected(task.graph, least.plan, least.found_bytes, {}, None, needed_bytes)
    elif expected.proven_bytes is not None:
        proven_bytes = min(proven_bytes, expected.proven_bytes)
        is_proven = proven_bytes > task.budget_bytes
    graph, found_bytes = expected.graph, expected.found_bytes
    tightest = simulate(graph, expected.plan)
    lines = [
        no_plan_fits(graph.name or "this step", _budget(task), proven=is_proven),
        f"  least     a plan fits {found_bytes} bytes ({format_bytes(found_bytes)})"
        f"{_listed(expected.held_bytes)}; proven: none fits less than {proven_bytes} "
        f"({format_bytes(proven_bytes)}); constants take {format_bytes(graph.constant_bytes)}",
        f"  tightest  {_where(graph, expected.plan, tightest)}, which needs at once: "
        f"{_modules(graph, tightest)}",
    ]
    if task.far is not None:
        lines.append(
            f"  far       that is without moves; with {format_bytes(task.far.capacity_bytes)} of "
            f"far memory none was found either: {outcome.note}"
        )
    ways = [
        f"a budget of {as_budget(expected.needed_bytes)}",
        _batch(task.budget_bytes, graph, tightest),
        _largest(graph, tightest),
    ]
    return "\n".join([*lines, "  try       " + "; ".join(way for way in ways if way)])


def _listed(held_bytes: Mapping[str, int]) -> str:
    """Name memory that is only expected."""
    held = [f"{format_bytes(size)} of {holder}" for holder, size in held_bytes.items() if size]
    return f", expected with {' and '.join(held)}" if held else ""


def _budget(task: Task) -> str:
    budget = format_bytes(task.budget_bytes)
    if task.whole_bytes is None:
        return f"the budget of {budget}"
    whole = format_bytes(task.whole_bytes)
    if task.budget_bytes <= 0:
        return f"the budget of {whole}, of which other calls leave it nothing"
    return f"the {budget} that the budget of {whole} leaves it"


def _least_whole(task: Task, least: MinimumBudget) -> int:
    """Return the least budget of the user: the part that others leave grows with it."""
    if task.whole_bytes is None:
        return least.found_bytes
    lacking = least.found_bytes - task.budget_bytes
    return task.whole_bytes + math.ceil(lacking / task.part if lacking > 0 else lacking)


def _where(graph: Graph, plan: Plan, tightest: Simulation) -> str:
    if tightest.peak_index < 0:
        return "the start of the step"
    step = plan.instructions[tightest.peak_index]
    if isinstance(step, Compute):
        return name_op(graph.ops[step.op])
    return "between forward and backward"


def _held(graph: Graph, tightest: Simulation) -> Counter[str]:
    made_by = producers(graph)
    held: Counter[str] = Counter()
    for value, size in tightest.holders:
        given = graph.values[value].role == "gradient"
        held[_GRADIENTS if given else holder_module(graph, made_by, value)] += size
    return held


def _modules(graph: Graph, tightest: Simulation) -> str:
    held = _held(graph, tightest)
    largest = held.most_common(_MODULES_SHOWN)
    parts = [f"{module} {format_bytes(size)}" for module, size in largest]
    others = sum(held.values()) - sum(size for _, size in largest)
    if others:
        parts.append(f"others {format_bytes(others)}")
    if tightest.peak_workspace_bytes:
        parts.append(f"workspace {format_bytes(tightest.peak_workspace_bytes)}")
    return ", ".join(parts) or "only constants"


def _batch(budget_bytes: int, graph: Graph, tightest: Simulation) -> str:
    """Estimate the batch that fits: saved tensors scale with it, gradients do not.

    Where nearly this batch fits, that is no advice.
    """
    values = graph.values
    gradients = sum(size for value, size in tightest.holders if values[value].role == "gradient")
    fixed = graph.constant_bytes + gradients
    scaling = tightest.peak_bytes - fixed
    if scaling <= 0 or budget_bytes <= fixed:
        return (
            "a smaller model or an optimizer with less state: parameters, gradients and the like "
            f"take {format_bytes(fixed)} by themselves, so no batch fits"
        )
    share = (budget_bytes - fixed) / scaling
    return f"a batch {100 * share:.0f} % as large" if share < _NEARLY_ALL else ""


def _largest(graph: Graph, tightest: Simulation) -> str:
    """Name the module whose outputs and gradients could be made smaller with the most effect."""
    modules = {op.module for op in graph.ops if op.module}
    largest = [held for held in _held(graph, tightest).most_common() if held[0] in modules]
    least = _WORTH_NAMING * (tightest.peak_bytes - graph.constant_bytes)
    if not largest or largest[0][1] < least:
        return ""
    module, made = largest[0][0], format_bytes(largest[0][1])
    return f"fewer features or a smaller input in {module}, which makes {made} of that"


def infeasible(task: Task, outcome: Outcome, least: MinimumBudget) -> NoPlan:
    """Return the error that names the budget asked for, the least, and what to try."""
    return NoPlan(task, outcome, least)
