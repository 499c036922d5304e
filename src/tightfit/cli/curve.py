"""``tightfit curve``: extra compute against memory, with proven bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tightfit.cli.console import terminal_progress
from tightfit.cli.options import DEFAULT_PLAN_OPTIONS, Json, PlanOptions, StepName
from tightfit.cli.output import check_output, csv_of, percent_or_dash, print_result
from tightfit.cli.target import budgets_named, load_step
from tightfit.files import write_atomically
from tightfit.graph.ir import Graph
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan.plan import Gradients
from tightfit.planners.questions.curve import CurvePoint, pareto_curve
from tightfit.reporting.pictures.curve import curve_picture
from tightfit.reporting.pictures.found import Found
from tightfit.units import format_bytes, unit_of

_BUDGETS = "0.9,0.8,0.7,0.6,0.5,0.4,0.3"
_COLUMNS = ("budget_bytes", "ratio", "overhead", "bound", "status", "peak_bytes", "seconds")


def curve(
    target: StepName,
    /,
    *,
    budgets: str = _BUDGETS,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    options: PlanOptions = DEFAULT_PLAN_OPTIONS,
    json: Json = False,
) -> int:
    """Print the extra compute of plans at many budgets, and the bound proven at each.

    Each search starts from the plan of a larger budget; less memory never costs less.

    ```sh
    tightfit curve zoo:vgg16 -o curve.svg
    tightfit curve graph.json --budgets 0.8,0.5,600MiB
    ```

    Parameters
    ----------
    budgets
        Separated by commas: shares of the activation peak, such as 0.3,0.5, or sizes with a unit.
    output
        Write the curve to this file: .csv, or .svg, .png or .pdf for a picture.
    """
    limits = options.limits()
    check_output(output, [".csv"])
    with terminal_progress() as progress:
        step = load_step(target, options, progress=progress)
    gradients = options.gradients
    asked = [size for size, _ in budgets_named(step, budgets, gradients)]
    with terminal_progress() as progress:
        points = pareto_curve(step, asked, gradients, limits, progress)
    rows = [_row(step, point, gradients) for point in points]
    if output is not None:
        if output.suffix == ".csv":
            content = csv_of(rows, _COLUMNS)
        else:
            content = _picture(step.name, points, output.suffix)
        write_atomically(output, content)
    return print_result(
        _table(rows),
        as_json=json,
        status="feasible" if any(row["peak_bytes"] for row in rows) else "infeasible",
        constant_bytes=step.constant_bytes,
        seconds=sum(row["seconds"] for row in rows),
        rows=rows,
    )


def _row(graph: Graph, point: CurvePoint, gradients: Gradients) -> dict[str, Any]:
    constants, outcome = graph.constant_bytes, point.outcome
    activations = eager_peak_bytes(graph, gradients=gradients) - constants
    return {
        "budget_bytes": point.budget_bytes,
        "ratio": (point.budget_bytes - constants) / activations if activations else None,
        "overhead": _finite(outcome.overhead),
        "bound": _finite(outcome.bound),
        "status": outcome.status,
        "peak_bytes": outcome.peak_bytes if outcome.plan is not None else None,
        "seconds": outcome.seconds,
    }


def _picture(name: str, points: Sequence[CurvePoint], suffix: str) -> bytes:
    unit, unit_bytes = unit_of(max((point.budget_bytes for point in points), default=0))
    return curve_picture(
        [
            Found(
                budget=point.budget_bytes / unit_bytes,
                overhead=_finite(point.outcome.overhead),
                bound=_finite(point.outcome.bound),
                status=point.outcome.status,
            )
            for point in points
        ],
        title=f"{name}: extra compute by budget",
        budgets=f"budget in {unit}, constants included",
        suffix=suffix,
    )


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _table(rows: Sequence[dict[str, Any]]) -> str:
    header = f"{'budget':>12} {'ratio':>6} {'overhead':>10} {'proven least':>12}  status"
    return "\n".join([header, *map(_line, rows)])


def _line(row: dict[str, Any]) -> str:
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
    overhead, bound = percent_or_dash(row["overhead"]), percent_or_dash(row["bound"])
    return (
        f"{format_bytes(row['budget_bytes']):>12} {ratio:>6} {overhead:>10} "
        f"{bound:>12}  {row['status']} ({row['seconds']:.1f} s)"
    )
