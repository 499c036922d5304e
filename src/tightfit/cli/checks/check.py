"""``tightfit check``: memory of a model and overhead of a budget, without running it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from tightfit.cli.checks.flags import compare_flags as compare
from tightfit.cli.checks.lengths import check_lengths
from tightfit.cli.console import terminal_progress
from tightfit.cli.options import (
    DEFAULT_PLAN_OPTIONS,
    ActivationShare,
    BudgetText,
    Json,
    PlannerName,
    PlanOptions,
    require_model,
)
from tightfit.cli.output import outcome_numbers, print_result
from tightfit.errors import BadInput
from tightfit.graph.ir import Graph
from tightfit.planners.registry import DEFAULT
from tightfit.reporting.text import render_explanation, render_outcome
from tightfit.units import format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    from tightfit.api.check import Check

_LENGTH_S = 5.0
"""For each length that is tried."""


def check(
    model: str,
    /,
    *,
    budget: BudgetText = None,
    budget_ratio: ActivationShare = None,
    planner: PlannerName = DEFAULT,
    compare_flags: Annotated[bool, Parameter(negative="")] = False,
    lengths: Path | None = None,
    options: PlanOptions = DEFAULT_PLAN_OPTIONS,
    json: Json = False,
) -> int:
    """Say how much memory a model needs and how much time a budget costs, without running it.

    The search ends once the plan costs at most half a percent of the step more than the least
    that is proven; tightfit plan goes on to the end.

    ```sh
    tightfit check zoo:resnet50 --budget 600MiB
    tightfit check my_model.py:make --budget-ratio 0.5  # half of its activations
    tightfit check my_model.py:make --budget minimum
    tightfit check my_model.py:make --compare-flags     # checkpointing and others
    tightfit check zoo:gpt2 --budget 2GiB --lengths lengths.txt
    ```

    Parameters
    ----------
    model
        zoo:NAME, package.module:factory or path/to/file.py:factory.
    budget
        The budget with a unit, such as 8GiB, constants included; or minimum.
    compare_flags
        Without a budget: a comparison of PyTorch's own ways to save memory on this model, and of
        tightfit at three budgets.
    lengths
        Which batches of a data set would not fit. A file with the length of one sample a line, in
        their order: --batch of them make a batch, padded to the longest. Or a file with a length
        and how many batches have it. The factory is called with sequence=.
    """
    require_model(model, "for a graph file use tightfit plan")
    limits = options.limits()
    if lengths is not None:
        short = msgspec.structs.replace(limits, seconds=min(limits.seconds, _LENGTH_S), gap=0.02)
        return check_lengths(model, lengths, budget, options, short, planner=planner, as_json=json)
    if compare_flags and (budget is not None or budget_ratio is not None):
        raise BadInput("--compare-flags chooses its budgets itself: leave the budget out")
    if not compare_flags and (budget is None) == (budget_ratio is None):
        raise BadInput(
            "give one budget: --budget 8GiB for all that the step may hold; --budget-ratio 0.5 for "
            "half of its present bytes beyond its constants; or --budget minimum for the least"
        )
    from tightfit.api.check import ENOUGH
    from tightfit.api.check import check as check_model

    limits = msgspec.structs.replace(limits, gap=ENOUGH)
    if compare_flags:
        return compare(model, options, limits, as_json=json)

    with terminal_progress() as progress:
        found = check_model(
            model,
            budget=budget,
            budget_ratio=budget_ratio,
            planner=planner,
            limits=limits,
            progress=progress,
            **options.step_keywords(),
        )
    outcome = found.outcome
    return print_result(
        _text(found),
        as_json=json,
        status=outcome.status if found.fits else "infeasible",
        budget_bytes=found.budget_bytes,
        minimum_budget_bytes=found.minimum.found_bytes,
        seconds=found.seconds,
        eager_peak_bytes=found.eager_peak_bytes,
        lower_bound_bytes=found.minimum.lower_bytes,
        height_bytes=found.height_bytes,
        constants_bytes=dict(found.graph.constants_bytes),
        cost_source=found.graph.cost_source,
        ops=len(found.graph.ops),
        proven=outcome.status == "infeasible",
        **outcome_numbers(found.graph, outcome),
    )


def _text(found: Check) -> str:
    graph, least = found.graph, found.minimum
    constants = ", ".join(
        f"{kind.replace('_', ' ')} {format_bytes(size)}"
        for kind, size in graph.constants_bytes.items()
        if size
    )
    lines = [
        f"{graph.name}: {len(graph.ops)} ops on {graph.device.name or graph.device.kind}, costs "
        f"{graph.cost_source}; {format_seconds(found.seconds)}",
        f"  constants {format_bytes(graph.constant_bytes)}: {constants}",
        f"  eager     {format_bytes(found.eager_peak_bytes)} with nothing recomputed",
        f"  minimum   {format_bytes(least.found_bytes)} at an overhead of "
        f"{format_percent(least.overhead)}; proven: none fits less than "
        f"{format_bytes(least.lower_bytes)}",
        *(f"  note      {note}" for note in _notes(graph)),
        "",
    ]
    if found.explanation is None or found.height_bytes is None:
        return "\n".join([*lines, found.message])
    share = found.height_bytes / found.outcome.peak_bytes
    height = f"{format_bytes(found.height_bytes)} laid out, {share:.4f} times the peak"
    lines += [render_outcome(found.outcome, graph), f"  height    {height}", ""]
    return "\n".join([*lines, render_explanation(found.explanation)])


def _notes(graph: Graph) -> list[str]:
    """Name memory that the numbers leave out."""
    notes: list[str] = []
    if not graph.cost_source.startswith("measured"):
        notes.append(
            "modelled costs know no workspace of operators (convolutions need some): use --costs "
            "measured for this machine's"
        )
    if graph.cost_source.endswith("(estimate)"):
        notes.append("an estimate: operators are those of the CPU, at the GPU's sizes and rates")
        forward = [op.target for op in graph.ops if "backward" not in op.target]
        flash = sum("flash_attention" in target for target in forward)
        whole = sum("_safe_softmax" in target for target in forward)
        if flash:
            notes.append(f"{flash} attentions are flash here and count as flash there")
        if whole:
            notes.append(
                f"{whole} attentions keep their [tokens, tokens] weights here (a CPU has no flash "
                "attention with dropout or for such shapes); on the GPU flash may need less"
            )
    return notes
