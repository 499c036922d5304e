"""``tightfit report``: one offline HTML page about a plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

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
    is_model,
)
from tightfit.cli.output import plan_numbers, print_result
from tightfit.cli.target import budgets_named, chosen_budget, load_step, load_target
from tightfit.errors import BadInput
from tightfit.files import kind_of_record, read_limited
from tightfit.graph.ir import Exactness, Graph
from tightfit.plan.io import plan_from_json
from tightfit.plan.less_exact import LessExact
from tightfit.plan.plan import Gradients, Plan
from tightfit.plan.simulate import simulate
from tightfit.plan.verify import verify
from tightfit.planners.base import Limits, Task
from tightfit.planners.questions.curve import pareto_curve
from tightfit.planners.questions.infeasible import infeasible
from tightfit.planners.questions.minimum import minimum_budget
from tightfit.planners.registry import DEFAULT, find_planner, plan_with
from tightfit.progress import Progress
from tightfit.reporting.html.facts import BudgetPoint
from tightfit.reporting.html.sentences import ProvenBound
from tightfit.units import format_bytes

_BUDGETS = "0.9,0.7,0.55,0.4,0.3"
_CURVE_S = 2.0
"""For each plan of the curve, and for the plan with less exact alternatives."""

_LESS_EXACT: Exactness = "rounding"
"""The next class after `bitwise`, with which models are planned."""


def report(
    target: str,
    graph: str | None = None,
    /,
    *,
    budget: StepBudget = None,
    budget_ratio: ActivationShare = None,
    planner: PlannerName = DEFAULT,
    budgets: str = _BUDGETS,
    output: Annotated[Path, Parameter(alias="-o")] = Path("report.html"),
    options: PlanOptions = DEFAULT_PLAN_OPTIONS,
    json: Json = False,
) -> int:
    """Write one offline HTML page about a plan: memory over the step, its holders, its cost.

    ```sh
    tightfit report my_model.py:make --budget-ratio 0.5
    tightfit report plan.json graph.json -o report.html
    ```

    Parameters
    ----------
    target
        A plan file, followed by the graph it was made for; or a graph file or a model (zoo:NAME,
        package.module:factory or path/to/file.py:factory), with a budget to plan for.
    graph
        The graph file of a plan.
    budgets
        For the curve on the page, separated by commas: shares of the activation peak, such as
        0.3,0.5, or sizes with a unit; none for no curve.
    output
        Write the page to this file (.html).
    """
    from tightfit.api.pages import check_page, write_page

    started = time.perf_counter()
    check_page(output)
    find_planner(planner)  # before the capture, which takes long
    limits = options.limits()
    given = None if is_model(target) else _plan_in(target)
    with terminal_progress() as progress:
        if given is not None:
            step, plan, proven = _with_graph(given, target, graph, options.costs), given, None
        else:
            if graph is not None:
                raise BadInput(f"{target} is no plan; a second file is the graph of a plan")
            step = load_step(target, options, progress=progress)
            size = chosen_budget(step, budget, budget_ratio, options.gradients)
            task = Task(graph=step, budget_bytes=size, gradients=options.gradients)
            plan, proven = _planned(task, planner, limits, progress)
        curve = _curve(step, budgets, plan.gradients, limits, progress)
        result = simulate(step, plan)
        further: tuple[str, ...] = ()
        if is_model(target):
            wider = load_step(target, options, progress=progress, exactness=_LESS_EXACT)
            further = (_gained(wider, plan, result.overhead, limits, progress).sentence,)
        write_page(output, step, plan, proven=proven, curve=curve, further=further)
    size = output.stat().st_size
    return print_result(
        f"{output} ({format_bytes(size)}): open it in any browser, it needs no network",
        as_json=json,
        status="feasible",
        bound=None if proven is None else proven.bound,
        seconds=time.perf_counter() - started,
        page=str(output),
        page_bytes=size,
        **plan_numbers(step, plan, result),
    )


def _plan_in(file: str) -> Plan | None:
    """Return the plan in a file; None if it is a graph's."""
    content = read_limited(file)
    return plan_from_json(content, source=file) if kind_of_record(content) == "plan" else None


def _with_graph(plan: Plan, file: str, graph: str | None, costs: str | None) -> Graph:
    if graph is None:
        raise BadInput(
            f"{file} is a plan, which does not hold the step it was made for. Name the graph file "
            "after it (tightfit plan MODEL -o plan.json --graph-output graph.json writes both), "
            "or name the model instead, with a budget"
        )
    step = load_target(graph, costs)
    verify(plan, step)
    return step


def _planned(
    task: Task, planner: str, limits: Limits, progress: Progress
) -> tuple[Plan, ProvenBound | None]:
    """Return a plan for the budget.

    Raises `InfeasibleBudget` if none is found; says the least.
    """
    outcome = plan_with(planner, task, limits, progress)
    if outcome.plan is None:
        least = minimum_budget(task.graph, task.gradients, Limits(seconds=10.0), progress)
        raise infeasible(task, outcome, least)
    return outcome.plan, ProvenBound(outcome.bound, outcome.bound_source)


def _gained(
    wider: Graph, plan: Plan, overhead: float, limits: Limits, progress: Progress
) -> LessExact:
    """Return the gain of less exact alternatives within the budget of a plan with overhead."""
    task = Task(graph=wider, budget_bytes=plan.budget_bytes, gradients=plan.gradients)
    found = plan_with(DEFAULT, task, _briefly(limits), progress)
    return LessExact.of(_LESS_EXACT, found, overhead)


def _briefly(limits: Limits) -> Limits:
    return msgspec.structs.replace(limits, seconds=min(limits.seconds, _CURVE_S))


def _curve(
    step: Graph, budgets: str, gradients: Gradients, limits: Limits, progress: Progress
) -> Sequence[BudgetPoint]:
    """Return plans for other budgets, each searched for a short while."""
    if budgets == "none":
        return ()
    asked = [size for size, _ in budgets_named(step, budgets, gradients)]
    return tuple(
        BudgetPoint(
            budget_bytes=point.budget_bytes,
            overhead=point.outcome.overhead if point.outcome.plan is not None else None,
            bound=point.outcome.bound if point.outcome.plan is not None else None,
            status=point.outcome.status,
        )
        for point in pareto_curve(step, asked, gradients, _briefly(limits), progress)
    )
