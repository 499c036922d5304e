"""MONeT's claims with today's operators: overhead at its least memory, memory at 10 %, Gist.

python benchmarks/monet_headline.py --time-limit 20

Models of the zoo at the paper's batch sizes, captured on fake tensors, P100 roofline costs, no
workspace, alternatives with the default's bits (Gist: also lossy ones). Shares are of what PyTorch
takes with default implementations and nothing recomputed, constants counted. Rows go to
``benchmarks/results/monet_headline.jsonl``; one that is there is not computed again.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rows import append_rows, read_rows
from tightfit.graph.ir import Exactness, Graph
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan.plan import Outcome
from tightfit.planners.anytime.planner import run_anytime
from tightfit.planners.base import Limits, Task
from tightfit.planners.questions.minimum import minimum_budget
from tightfit.planners.registry import plan_with
from tightfit.progress import SILENT
from tightfit.studies.dry_step import AllowedAlternatives, graph_of

ROWS = Path(__file__).parent / "results" / "monet_headline.jsonl"
SHARES = {
    "vgg16": 0.39,
    "resnet50": 0.33,
    "googlenet": 0.33,
    "mobilenet_v2": 0.34,
    "unet": 0.35,
    "unet3d": 0.54,
}
"""The least share of PyTorch's memory that the paper reports (table 3; appendix J)."""

WAYS = ("all", "noop")
OVERHEAD = 0.10
STEP = 0.01  # of PyTorch's memory: how near the ends of a bracket come


def main() -> None:
    """Run every cell whose row is missing."""
    options = parse()
    rows = read_rows(ROWS)
    done = {(row["graph"], row["question"], row["ways"]) for row in rows}
    for model, question, ways in cells(options.models.split(",")):
        if (model, question, ways) in done:
            continue
        row = {"graph": model, "question": question, "ways": ways}
        row |= QUESTIONS[question](model, ways, options) | {"load": round(os.getloadavg()[0], 1)}
        print(row, flush=True)
        append_rows(ROWS, row)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(SHARES))
    parser.add_argument("--costs", default="p100")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds per plan")
    return parser.parse_args()


def cells(models: list[str]) -> Iterator[tuple[str, str, str]]:
    """Each model, question and set of alternatives."""
    for question in QUESTIONS:
        for model in models:
            for ways in ("lossless", "lossy") if question == "gist" else WAYS:
                yield model, question, ways


@lru_cache(maxsize=1)
def captured(model: str, costs: str, exactness: Exactness = "bitwise") -> Graph:
    """The graph of a zoo model at MONeT's setting."""
    return graph_of(
        f"zoo:{model}",
        optimizer="none",
        costs=costs,
        setting="monet",
        alternatives=AllowedAlternatives(exactness),
    )


def planned(graph: Graph, share: float, ways: str, options: argparse.Namespace) -> Outcome:
    """A plan at a share of PyTorch's memory."""
    task = Task(graph=graph, budget_bytes=int(share * eager_peak_bytes(graph)))
    limits = Limits(seconds=options.time_limit)
    return run_anytime(task, limits, SILENT, alternatives=ways == "all").outcome


def at_share(model: str, ways: str, options: argparse.Namespace) -> dict[str, Any]:
    """Overhead and bound at the least share of memory that the paper reports."""
    graph = captured(model, options.costs)
    outcome = planned(graph, SHARES[model], ways, options)
    found = outcome.plan is not None
    return {
        "n": len(graph.ops),
        "pytorch_bytes": eager_peak_bytes(graph),
        "share": SHARES[model],
        "status": outcome.status,
        "overhead": outcome.overhead if found else None,
        "bound": None if outcome.status == "infeasible" else outcome.bound,
        "bound_source": outcome.bound_source,
        "seconds": round(outcome.seconds, 2),
    } | (at_the_least(graph, options) if ways == "all" and not found else {})


def at_the_least(graph: Graph, options: argparse.Namespace) -> dict[str, Any]:
    """The share that some plan needs, and the one that every plan in the traced order needs."""
    least = minimum_budget(graph, limits=Limits(seconds=options.time_limit))
    whole = eager_peak_bytes(graph)
    return {
        "found_share": least.found_bytes / whole,
        "found_overhead": least.overhead,
        "proven_share": least.lower_bytes / whole,
    }


def at_overhead(model: str, ways: str, options: argparse.Namespace) -> dict[str, Any]:
    """The least share with an overhead of at most 10 %, bracketed from below by proofs."""
    graph = captured(model, options.costs)
    found, proven = 1.0, 0.0
    tried_below = 0.0  # neither: no plan found, none excluded
    while found - max(proven, tried_below) > STEP:
        share = (found + max(proven, tried_below)) / 2
        outcome = planned(graph, share, ways, options)
        if outcome.plan is not None and outcome.overhead <= OVERHEAD:
            found = outcome.peak_bytes / eager_peak_bytes(graph)
        elif outcome.status == "infeasible" or outcome.bound > OVERHEAD:
            proven = share
        else:
            tried_below = share
    return {"least_share": found, "proven_above": proven}


def of_gist(model: str, ways: str, options: argparse.Namespace) -> dict[str, Any]:
    """Share and overhead of Gist's one plan."""
    exactness: Exactness = "lossy" if ways == "lossy" else "bitwise"
    graph = captured(model, options.costs, exactness)
    whole = eager_peak_bytes(graph)
    outcome = plan_with("gist", Task(graph=graph, budget_bytes=2 * whole), Limits())
    return {"share": outcome.peak_bytes / whole, "overhead": outcome.overhead}


QUESTIONS = {"share": at_share, "overhead": at_overhead, "gist": of_gist}


if __name__ == "__main__":
    main()
