"""A comparison of planners as a table for people, as CSV, and as a plot."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import msgspec

from tightfit.cli.output import percent_or_dash
from tightfit.planners.questions.compare import ComparisonRow
from tightfit.reporting.plot import Curve, line_plot
from tightfit.units import format_bytes

__all__ = ["comparison_csv", "comparison_table", "overhead_plot"]


def comparison_table(rows: Sequence[ComparisonRow], ratios: Sequence[float | None]) -> str:
    """Return rows as aligned text, one block per budget.

    Parameters
    ----------
    rows : sequence of ComparisonRow
        What planners found.
    ratios : sequence of float or None
        For each row, the budget as a share of the activation peak, if it was given so.
    """
    lines: list[str] = []
    budget = None
    width = max((len(row.planner) for row in rows), default=0)
    for row, ratio in zip(rows, ratios, strict=True):
        if row.budget_bytes != budget:
            budget = row.budget_bytes
            share = "" if ratio is None else f" ({ratio:g} of the activation peak)"
            lines += ["", f"budget {format_bytes(row.budget_bytes)}{share}"]
            lines.append(
                f"  {'planner':{width}} {'status':10} {'overhead':>9} {'bound':>9} {'gap':>9} "
                f"{'peak':>11} {'seconds':>8}  note"
            )
        lines.append(
            f"  {row.planner:{width}} {row.status:10} {percent_or_dash(row.overhead):>9} "
            f"{percent_or_dash(row.bound):>9} {percent_or_dash(row.gap):>9} "
            f"{'-' if row.peak_bytes is None else format_bytes(row.peak_bytes):>11} "
            f"{row.seconds:8.2f}  {_short(row.note)}"
        )
    return "\n".join(lines[1:])


def _short(note: str) -> str:
    return note if len(note) <= 70 else note[:67] + "..."


def comparison_csv(rows: Sequence[ComparisonRow]) -> str:
    """Return rows as comma-separated values with a header; fractions, bytes and seconds."""
    out = io.StringIO()
    records = [msgspec.structs.asdict(row) for row in rows]
    writer = csv.DictWriter(out, fieldnames=list(records[0]) if records else [])
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def overhead_plot(name: str, rows: Sequence[ComparisonRow]) -> str:
    """Return overhead against memory, one line per planner, as in Checkmate's figure 4."""
    curves = [
        Curve(planner, tuple(_points(rows, planner)))
        for planner in dict.fromkeys(row.planner for row in rows)
    ]
    return line_plot(
        curves,
        title=f"{name}: extra compute by budget",
        x_label="budget in GiB, constants included",
        y_label="overhead in percent",
    )


def _points(rows: Sequence[ComparisonRow], planner: str) -> list[tuple[float, float]]:
    return sorted(
        (row.budget_bytes / 2**30, 100 * row.overhead)
        for row in rows
        if row.planner == planner and row.overhead is not None
    )
