"""``tightfit minimum``: the least budget for which a plan exists."""

from __future__ import annotations

from tightfit.cli.console import terminal_progress
from tightfit.cli.options import DEFAULT_STEP_OPTIONS, Json, StepName, StepOptions, chosen_limits
from tightfit.cli.output import print_result
from tightfit.cli.target import load_step
from tightfit.plan.simulate import simulate
from tightfit.planners.base import Limits
from tightfit.planners.questions.minimum import minimum_budget
from tightfit.units import format_bytes, format_percent, format_seconds


def minimum(
    target: StepName,
    /,
    *,
    time_limit: float = Limits().seconds,
    options: StepOptions = DEFAULT_STEP_OPTIONS,
    json: Json = False,
) -> int:
    """Find the least budget that has a plan, and below which it is proven that none has.

    ```sh
    tightfit minimum zoo:gpt2
    tightfit minimum graph.json
    ```

    Parameters
    ----------
    time_limit
        Seconds to search at most.
    """
    limits = chosen_limits(time_limit)
    with terminal_progress() as progress:
        step = load_step(target, options, progress=progress)
        found = minimum_budget(step, options.gradients, limits, progress)
    result = simulate(step, found.plan)
    closed = found.lower_bytes >= found.found_bytes
    return print_result(
        f"a plan fits {found.found_bytes} bytes ({format_bytes(found.found_bytes)}) "
        f"at an overhead of {format_percent(result.overhead)}\n"
        f"none fits less than {found.lower_bytes} bytes ({format_bytes(found.lower_bytes)}): "
        f"proven; {format_seconds(found.seconds)}",
        as_json=json,
        status="optimal" if closed else "feasible",
        budget_bytes=found.found_bytes,
        constant_bytes=step.constant_bytes,
        planned_peak_bytes=result.peak_bytes,
        overhead=result.overhead,
        minimum_budget_bytes=found.found_bytes,
        seconds=found.seconds,
        lower_bound_bytes=found.lower_bytes,
    )
