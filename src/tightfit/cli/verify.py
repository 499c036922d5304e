"""``tightfit verify``: judge a plan against its graph."""

from __future__ import annotations

import time

from tightfit.cli.options import GraphOfPlan, Json, OtherCosts, PlanFile
from tightfit.cli.output import plan_numbers, print_result
from tightfit.cli.target import load_target
from tightfit.plan.io import load_plan
from tightfit.plan.simulate import simulate
from tightfit.plan.verify import verify as verify_plan
from tightfit.units import format_bytes, format_percent


def verify(
    plan: PlanFile, graph: GraphOfPlan, /, *, costs: OtherCosts = None, json: Json = False
) -> int:
    """Check every instruction of a plan, and its peak, against its graph and budget.

    ```sh
    tightfit verify plan.json graph.json
    ```
    """
    started = time.perf_counter()
    step = load_target(graph, costs)
    loaded = load_plan(plan)
    verify_plan(loaded, step)
    result = simulate(step, loaded)
    return print_result(
        f"the plan is valid: peak {format_bytes(result.peak_bytes)} of "
        f"{format_bytes(loaded.budget_bytes)}, overhead {format_percent(result.overhead)}",
        as_json=json,
        status="feasible",
        seconds=time.perf_counter() - started,
        **plan_numbers(step, loaded, result),
    )
