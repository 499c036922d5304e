"""``tightfit minimum``: the least budget for which a plan exists."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from tightfit.cli.console import terminal_progress
from tightfit.cli.model import DEFAULT_MODEL_OPTIONS, ModelOptions, OptimizerName
from tightfit.cli.output import print_result
from tightfit.cli.target import load_step
from tightfit.plan.simulate import simulate
from tightfit.planners.base import Limits
from tightfit.planners.minimum import minimum_budget
from tightfit.units import format_bytes, format_percent, format_seconds

__all__ = ["minimum"]


def minimum(
    target: str,
    /,
    *,
    options: Annotated[ModelOptions, Parameter(name="*")] = DEFAULT_MODEL_OPTIONS,
    optimizer: OptimizerName = "adamw",
    time_limit: float = Limits().seconds,
    gradients: Literal["fresh", "accumulated"] = "fresh",
    costs: str | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Find the least budget: the proven lower limit, and the smallest with a plan found.

    Parameters
    ----------
    target
        A graph file (.json or .json.gz), or a model: zoo:NAME, package.module:factory or
        path/to/file.py:factory.
    optimizer
        Whose state is assumed for a model: adamw keeps two copies of the parameters.
    time_limit
        Seconds to search at most.
    gradients
        Whether gradients of parameters are made anew or added to existing ones.
    costs
        Modelled costs instead of those in the file, such as unit, flops, v100, a100; of a model
        also measured. By default a model has those of this CPU's roofline.
    json
        Print one JSON object.
    """
    with terminal_progress() as progress:
        step = load_step(
            target,
            options,
            costs=costs,
            optimizer=optimizer,
            gradients=gradients,
            progress=progress,
        )
        found = minimum_budget(step, gradients, Limits(seconds=time_limit), progress)
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
