"""``tightfit max-batch``: the largest batch that trains within a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tightfit.cli.console import terminal_progress
from tightfit.cli.options import DEFAULT_PLAN_OPTIONS, Json, PlannerName, PlanOptions, require_model
from tightfit.cli.output import outcome_numbers, print_result
from tightfit.planners.registry import DEFAULT
from tightfit.units import format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    from tightfit.api.max_batch import MaxBatch


def max_batch(
    model: str,
    /,
    *,
    budget: Annotated[str, Parameter(allow_leading_hyphen=True)],
    max_overhead: Annotated[float, Parameter(allow_leading_hyphen=True)] = float("inf"),
    reserve: str | None = None,
    planner: PlannerName = DEFAULT,
    options: PlanOptions = DEFAULT_PLAN_OPTIONS,
    json: Json = False,
) -> int:
    """Find the largest batch within a budget: nothing runs, no memory is taken for it.

    ```sh
    tightfit max-batch zoo:resnet50 --budget 8GiB --max-overhead 0.1
    ```

    Parameters
    ----------
    model
        zoo:NAME, package.module:factory or path/to/file.py:factory; the factory takes batch=.
    budget
        The budget with a unit, such as 8GiB, constants included.
    max_overhead
        The largest acceptable extra compute, such as 0.2 for 20 %.
    reserve
        How much of the budget to leave unused, such as 200MiB; by default 2 % of it.
    """
    limits = options.limits()
    require_model(model, "a graph file has one batch size only")
    from tightfit.api.max_batch import max_batch_size

    with terminal_progress() as progress:
        found = max_batch_size(
            model,
            budget=budget,
            max_overhead=max_overhead,
            reserve=reserve,
            planner=planner,
            limits=limits,
            progress=progress,
            **options.step_keywords(),
        )
    outcome = found.outcome
    return print_result(
        _text(found),
        as_json=json,
        status=outcome.status,
        budget_bytes=found.budget_bytes,
        seconds=found.seconds,
        batch=found.batch,
        eager_batch=found.eager_batch,
        too_large=found.too_large,
        reserve_bytes=found.reserve_bytes,
        **outcome_numbers(found.graph, outcome),
    )


def _text(found: MaxBatch) -> str:
    outcome = found.outcome
    lines = [
        f"{found.graph.name}: a batch of {found.batch} fits {format_bytes(found.budget_bytes)} "
        f"with {format_bytes(found.reserve_bytes)} in reserve",
        f"  planned   peak {format_bytes(outcome.peak_bytes)}, constants "
        f"{format_bytes(found.graph.constant_bytes)}, overhead {format_percent(outcome.overhead)}, "
        f"proven lower bound {format_percent(outcome.bound)} ({outcome.status})",
        f"  eager     {_eager(found)}",
    ]
    if found.too_large is not None:
        lines.append(f"  beyond    no plan found for a batch of {found.too_large}, by estimate")
    return "\n".join([*lines, f"  {format_seconds(found.seconds)}"])


def _eager(found: MaxBatch) -> str:
    if found.eager_batch == 0:
        return "not even a batch of 1 fits with nothing recomputed"
    times = found.batch / found.eager_batch
    return f"a batch of {found.eager_batch} fits with nothing recomputed; this is {times:.2f} times"
