"""Whether checkmate closes small steps, cold: random models of 40 to 60 ops, captured and priced.

The seeds are the first of `benchmarks.random_models` whose steps have that many ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.documents import table
from benchmarks.random_models import random_example
from benchmarks.rows import Row
from tightfit.graph.ir import Graph
from tightfit.studies.dry_step import captured_step

__all__ = ["SEEDS", "small_parts", "small_step"]

SEEDS = "19,22,30,38,40,48,66,79,87,95,101,102"


def small_step(seed: int, costs: str) -> Graph:
    """The graph of one step of the random model of a seed."""
    return captured_step(lambda: random_example(seed), optimizer="none", costs=costs).graph


def small_parts(rows: Sequence[Row]) -> list[str]:
    """What each step's program ended with, and after how long."""
    if not rows:
        return []
    ratios = sorted({row["ratio"] for row in rows})
    body = [
        [
            f"random model {graph}",
            str(next(row["ops"] for row in rows if row["graph"] == graph)),
            *(_cell(rows, graph, ratio) for ratio in ratios),
        ]
        for graph in dict.fromkeys(row["graph"] for row in rows)
    ]
    closed = sum(row["status"] != "feasible" and not _is_open(row) for row in rows)
    limit = max(row["time_limit_s"] for row in rows)
    return [
        "## Small steps, cold",
        f"checkmate with nothing borrowed, at most {limit:g} s a cell: {closed} of {len(rows)} "
        "closed. Overhead in percent (seconds). `=`: proven optimal. `none`: proven that "
        "Checkmate's search space, in the captured order, holds no plan. `one op`: a single "
        "operator needs more. Others: overhead found and the bound.",
        table(["step", "ops", *(f"{ratio:g}" for ratio in ratios)], body),
    ]


def _cell(rows: Sequence[Row], graph: str, ratio: float) -> str:
    row = next((r for r in rows if (r["graph"], r["ratio"]) == (graph, ratio)), None)
    if row is None:
        return ""
    if row["status"] == "infeasible":
        return "one op"
    seconds = f"({row['seconds']:.1f})"
    if row["overhead_percent"] is None:
        return f"- {seconds}" if _is_open(row) else f"none {seconds}"
    if row["status"] == "optimal":
        return f"{row['overhead_percent']:.2f} = {seconds}"
    return f"{row['overhead_percent']:.2f} / {row['bound_percent']:.2f} {seconds}"


def _is_open(row: dict[str, Any]) -> bool:
    """Whether neither a plan nor a proof that there is none was found."""
    return row["status"] == "unknown" and "no plan in its own" not in row["note"]
