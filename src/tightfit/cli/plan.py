"""``tightfit plan``: find a plan for a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from tightfit.cli.console import terminal_progress
from tightfit.cli.options import (
    DEFAULT_PLAN_OPTIONS,
    ActivationShare,
    Json,
    PlannerName,
    PlanOptions,
    StepBudget,
    StepName,
)
from tightfit.cli.output import outcome_numbers, print_result
from tightfit.cli.target import chosen_budget, is_model, load_step
from tightfit.errors import BadInput
from tightfit.graph.io import save_graph
from tightfit.graph.ir import EXACTNESS, Exactness
from tightfit.plan.explain import explain
from tightfit.plan.io import save_plan
from tightfit.plan.less_exact import LessExact, less_exact_than
from tightfit.plan.plan import Outcome
from tightfit.planners.base import Limits, Task
from tightfit.planners.questions.infeasible import infeasible_message
from tightfit.planners.questions.minimum import minimum_budget
from tightfit.planners.registry import DEFAULT, find_planner, plan_with
from tightfit.reporting.text import render_explanation, render_outcome


def plan(
    target: StepName,
    /,
    *,
    budget: StepBudget = None,
    budget_ratio: ActivationShare = None,
    planner: PlannerName = DEFAULT,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    graph_output: Path | None = None,
    exactness: Exactness | None = None,
    next_exactness: Annotated[bool, Parameter(negative="")] = False,
    options: PlanOptions = DEFAULT_PLAN_OPTIONS,
    json: Json = False,
) -> int:
    """Find the plan with the least extra compute that stays within a budget.

    ```sh
    tightfit plan zoo:vit --budget 2GiB -o plan.json --graph-output graph.json
    tightfit plan graph.json --budget 8GiB -o plan.json
    ```

    Parameters
    ----------
    output
        Write the plan to this file (.json or .json.gz).
    graph_output
        Write the graph of the step to this file: show, verify and report read it with the plan.
    exactness
        Of a model: how exact alternatives of operators must be. bitwise (the default), rounding or
        lossy.
    next_exactness
        Plan once more with the next, less exact class, and report its gain.
    """
    find_planner(planner)  # before the capture, which takes long
    limits = options.limits()
    with terminal_progress() as progress:
        step = load_step(target, options, progress=progress, exactness=exactness)
    if graph_output is not None:
        save_graph(step, graph_output)
    task = Task(
        graph=step,
        budget_bytes=chosen_budget(step, budget, budget_ratio, options.gradients),
        gradients=options.gradients,
    )
    with terminal_progress() as progress:
        outcome = plan_with(planner, task, limits, progress)
    if outcome.plan is not None and output is not None:
        save_plan(outcome.plan, output)
    gained = None
    if next_exactness:
        following = _following(target, exactness or EXACTNESS[0])
        before = None if outcome.plan is None else outcome.overhead
        with terminal_progress() as progress:
            other = load_step(target, options, progress=progress, exactness=following)
            found = plan_with(planner, msgspec.structs.replace(task, graph=other), limits, progress)
        gained = LessExact.of(following, found, before)
    return _print(outcome, task, gained, as_json=json)


def _following(target: str, exactness: Exactness) -> Exactness:
    """Return the next class, less exact."""
    following = less_exact_than(exactness)
    if following is None:
        raise BadInput(f"--next-exactness: no class is less exact than {exactness}")
    if not is_model(target):
        raise BadInput(f"--next-exactness asks for a model: {target} has its alternatives already")
    return following


def _print(outcome: Outcome, task: Task, gained: LessExact | None, *, as_json: bool) -> int:
    """Print an outcome; without a plan, also the least budget with a known plan."""
    graph = task.graph
    if outcome.plan is None:
        return _print_infeasible(outcome, task, gained, as_json=as_json)
    explanation = explain(outcome.plan, graph)
    said = "" if gained is None else f"\n\n{gained.sentence}"
    return print_result(
        f"{render_outcome(outcome, graph)}\n\n{render_explanation(explanation)}{said}",
        as_json=as_json,
        status=outcome.status,
        budget_bytes=task.budget_bytes,
        seconds=outcome.seconds,
        bound_source=outcome.bound_source,
        **outcome_numbers(graph, outcome),
        **_facts(gained),
    )


def _facts(gained: LessExact | None) -> dict[str, Any]:
    """Return the keys of the next class's gain, if that was asked for."""
    if gained is None:
        return {}
    return {
        "next_exactness": gained.exactness,
        "next_overhead": gained.overhead,
        "next_bound": gained.bound,
    }


def _print_infeasible(
    outcome: Outcome, task: Task, gained: LessExact | None, *, as_json: bool
) -> int:
    with terminal_progress() as progress:
        least = minimum_budget(task.graph, task.gradients, Limits(seconds=10.0), progress)
    said = "" if gained is None else f"\n{gained.sentence}"
    return print_result(
        f"{infeasible_message(task, outcome, least)}{said}",
        as_json=as_json,
        status="infeasible",
        budget_bytes=task.budget_bytes,
        minimum_budget_bytes=least.found_bytes,
        seconds=outcome.seconds,
        proven=outcome.status == "infeasible",
        **outcome_numbers(task.graph, outcome),
        **_facts(gained),
    )
