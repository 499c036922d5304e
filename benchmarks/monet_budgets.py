"""Seconds to a proven gap at the budgets of MONeT's appendix H, where its solver took hours.

python benchmarks/monet_budgets.py --time-limit 10

Models of the zoo at the paper's batch sizes, captured on fake tensors, P100 roofline costs;
``noop``: no alternatives of operators, as MONeT-NoOp; ``all``: with every one that tightfit knows.
A gap is a share of the time of the step: (1 + overhead) / (1 + bound) - 1. Rows go to
``benchmarks/results/monet_budgets.jsonl``; one that is there is not computed again.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.planning import MONET_MODELS
from benchmarks.rows import append_rows, read_rows
from tightfit.graph.ir import Graph
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan.plan import Outcome
from tightfit.planners.anytime.planner import run_anytime
from tightfit.planners.base import Limits, Task
from tightfit.progress import SILENT
from tightfit.studies.dry_step import graph_of

ROWS = Path(__file__).parent / "results" / "monet_budgets.jsonl"
BUDGETS_GIB = (5, 6, 7, 8, 9, 10)
GAPS = (0.05, 0.02)


def main() -> None:
    """Run every cell whose row is missing."""
    options = parse()
    rows = read_rows(ROWS)
    done = {(row["graph"], row["ways"], row["budget_gib"]) for row in rows}
    for model in options.models.split(","):
        for ways in ("noop", "all"):
            for gib in BUDGETS_GIB:
                if (model, ways, gib) in done:
                    continue
                row = cell(model, ways, gib, options)
                print(row, flush=True)
                append_rows(ROWS, row)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MONET_MODELS))
    parser.add_argument("--costs", default="p100")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds per cell and gap")
    return parser.parse_args()


@lru_cache(maxsize=1)
def captured(model: str, costs: str) -> Graph:
    """The graph of a zoo model at MONeT's setting."""
    return graph_of(f"zoo:{model}", optimizer="none", costs=costs, setting="monet")


def cell(model: str, ways: str, gib: int, options: argparse.Namespace) -> dict[str, Any]:
    """Plan one model at one budget, three times: to within 5 %, to within 2 %, and on."""
    graph = captured(model, options.costs)
    task = Task(graph=graph, budget_bytes=gib << 30)
    within: dict[str, float | None] = {}
    for gap in (*GAPS, Limits().gap):
        limits = Limits(seconds=options.time_limit, gap=gap)
        outcome = run_anytime(task, limits, SILENT, alternatives=ways == "all").outcome
        reached = outcome.status == "infeasible" or proven_gap(outcome) <= gap
        within[f"{gap:g}"] = round(outcome.seconds, 2) if reached else None
    return {
        "graph": model,
        "n": len(graph.ops),
        "ways": ways,
        "budget_gib": gib,
        "ratio": round((gib << 30) / eager_peak_bytes(graph), 3),
        "status": outcome.status,
        "overhead": outcome.overhead if outcome.plan is not None else None,
        "gap": proven_gap(outcome) if outcome.plan is not None else None,
        "seconds_to_gap": within,
        "seconds": round(outcome.seconds, 2),
        "bound_source": outcome.bound_source,
        "costs": options.costs,
        "time_limit_s": options.time_limit,
        "load": round(os.getloadavg()[0], 1),
    }


def proven_gap(outcome: Outcome) -> float:
    """By how much the step may be slower than the optimum, a fraction of the optimum."""
    return (1.0 + outcome.overhead) / (1.0 + outcome.bound) - 1.0


if __name__ == "__main__":
    main()
