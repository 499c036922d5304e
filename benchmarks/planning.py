"""The default planner on graphs of files, of the zoo and of any size: plans, bounds, times.

python benchmarks/planning.py --graphs ../shared/data/graphs --costs p100 \\
    --ratios 0.2,0.3,0.4 --time-limit 30 --json benchmarks/results/planning.jsonl

``--zoo`` takes models of the zoo instead, captured at the batch sizes of the MONeT paper or those
of another ``--setting``, ``--chain N`` a transformer's step of N ops (also measured: memory of the
process). Ratios are of the activation peak without recomputation; of the files their ``peak``, in
which gradients of parameters are not counted. With ``--iterations`` rows are reproducible on any
machine. ``benchmarks/planning_tables.py`` makes ``docs/planning.md`` of the rows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.graph_files import GraphFile, read_graph_folder
from benchmarks.transformer_chain import transformer_chain
from tightfit.graph.ir import Graph
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan.simulate import baseline_cost_s
from tightfit.planners.anytime.planner import run_anytime
from tightfit.planners.base import Limits, Task
from tightfit.progress import SILENT
from tightfit.studies.dry_step import graph_of

MONET_MODELS = ("vgg16", "unet", "mobilenet_v2", "resnet50", "googlenet")

COLUMNS = (
    "graph",
    "n",
    "ratio",
    "budget_bytes",
    "first_plan_s",
    "first_overhead_percent",
    "overhead_percent",
    "bound_percent",
    "status",
    "seconds",
)


def main() -> None:
    """Plan every graph at every ratio; print a table and write the rows."""
    options = parse()
    rows: list[dict[str, Any]] = []
    print("  ".join(COLUMNS))
    for name, file in sources(options):
        for ratio in map(float, options.ratios.split(",")):
            row = plan_cell(name, file, ratio, options)
            rows.append(row)
            print("  ".join(show(row[column]) for column in COLUMNS), flush=True)
            if options.json is not None:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--graphs", type=Path, help="folder of graph files")
    source.add_argument("--zoo", action="store_true", help="models at MONeT's batch sizes")
    source.add_argument("--chain", type=int, help="ops of a transformer's step")
    parser.add_argument("--setting", default="monet", help="batch sizes of models of the zoo")
    parser.add_argument("--costs", choices=("p100", "a100"), default="p100")
    parser.add_argument("--ratios", default="0.2,0.25,0.3,0.4,0.5,0.6,0.7,0.8")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds per cell")
    parser.add_argument("--iterations", type=int, help="instead of the time limit")
    parser.add_argument("--only", help="names of graphs, separated by commas")
    parser.add_argument("--json", type=Path, help="where the rows go, one JSON object per line")
    return parser.parse_args()


def sources(options: argparse.Namespace) -> Iterator[tuple[str, GraphFile]]:
    """The graphs asked for, by name."""
    only = options.only.split(",") if options.only else None
    if options.graphs is not None:
        for name, file in read_graph_folder(options.graphs, options.costs).items():
            if only is None or name in only:
                yield name, file
    elif options.chain is not None:
        graph = transformer_chain(options.chain)
        yield graph.name, with_peak(graph)
    else:
        for name in only or MONET_MODELS:
            asked = {"costs": options.costs, "setting": options.setting}
            yield name, with_peak(graph_of(f"zoo:{name}", optimizer="none", **asked))


def with_peak(graph: Graph) -> GraphFile:
    """A graph whose ratios are of its own activation peak, constants on top."""
    constants = graph.constant_bytes
    return GraphFile(graph, eager_peak_bytes(graph) - constants, constant_bytes=constants)


def plan_cell(
    name: str, file: GraphFile, ratio: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Plan one graph at one ratio of its peak."""
    budget = file.graph.constant_bytes + int(ratio * file.peak_bytes)
    limits = Limits(seconds=options.time_limit, iterations=options.iterations)
    task = Task(graph=file.graph, budget_bytes=budget)
    result = run_anytime(task, limits, SILENT)
    outcome, first = result.outcome, result.first
    to_percent = Percent(file)
    return {
        "graph": name,
        "n": len(file.graph.ops),
        "ratio": ratio,
        "budget_bytes": budget,
        "first_plan_s": None if first is None else round(first.seconds, 4),
        "first_overhead_percent": None if first is None else to_percent(first.overhead),
        "overhead_percent": to_percent(outcome.overhead),
        "bound_percent": to_percent(outcome.bound),
        "status": outcome.status,
        "seconds": round(outcome.seconds, 2),
        "bound_source": outcome.bound_source,
        "costs": options.costs,
        "iterations": options.iterations,
        "time_limit_s": options.time_limit,
        "load": round(os.getloadavg()[0], 1),
        "process_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


class Percent:
    """Turns overheads into percent, of the file's reference cost where it names one."""

    def __init__(self, file: GraphFile) -> None:
        self.scale = 1.0
        if file.reference_cost_s is not None:
            self.scale = baseline_cost_s(file.graph) / file.reference_cost_s

    def __call__(self, overhead: float) -> float | None:
        """Return percent with four decimals; None where there is no plan or no finite bound."""
        if not math.isfinite(overhead):
            return None
        return round(100.0 * ((1.0 + overhead) * self.scale - 1.0), 4)


def show(value: object) -> str:
    """Return a cell of the printed table."""
    return "-" if value is None else str(value)


if __name__ == "__main__":
    main()
