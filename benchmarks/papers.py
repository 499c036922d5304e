"""The papers' planners beside ours, on the same graphs, with the papers' numbers beside.

python benchmarks/papers.py compare --graphs ../shared/data/graphs --only vgg16 \\
    --ratios 0.6,0.7,0.8 --planners all --time-limit 120
python benchmarks/papers.py sizes|memory|batch --graphs ../shared/data/graphs
python benchmarks/papers.py tables

Rows go to ``benchmarks/results/papers-*.jsonl``, one JSON object per line, keyed by what was
asked; a row that is there is not computed again, so a run may be stopped and continued.
``tables`` writes ``docs/papers.md`` and its plots from the rows. Ratios are of the activation
peak without recomputation; gradients of parameters are not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.graph_files import GraphFile, read_graph_folder
from benchmarks.papers_tables import write_tables
from tightfit.graph.ir import Graph
from tightfit.planners.base import Limits, Task
from tightfit.planners.checkmate.program import build_program as build_checkmate
from tightfit.planners.checkmate.variables import frontier_stages
from tightfit.planners.compare import compared, planners_named
from tightfit.planners.monet.implementations import one_each
from tightfit.planners.monet.program import build_program as build_monet
from tightfit.planners.registry import PLANNERS, is_chain
from tightfit.planners.staged import Staged, staged

RESULTS = Path(__file__).parent / "results"
QUICK = ("anytime", "greedy", "linearised_greedy", "ap_greedy", "chen_greedy", "checkpoint_all")
GIB = 2**30


class Rows:
    """A file of rows that grows; each is known by its key."""

    def __init__(self, kind: str) -> None:
        self.path = RESULTS / f"papers-{kind}.jsonl"
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.rows = [json.loads(line) for line in lines]

    def add(self, key: dict[str, Any], compute: Callable[[], dict[str, Any]]) -> None:
        """Compute a row unless one with this key is there; print and store it."""
        if any(all(row.get(name) == value for name, value in key.items()) for row in self.rows):
            return
        row = {**key, **compute()}
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def main() -> None:
    """Run one of the benchmarks."""
    options = parse()
    commands = {"compare": compare, "sizes": sizes, "memory": memory, "batch": batch}
    if options.command == "tables":
        write_tables(RESULTS, Path(__file__).parent.parent / "docs")
    else:
        commands[options.command](options)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("compare", "sizes", "memory", "batch", "tables"))
    parser.add_argument("--graphs", type=Path, default=Path("../shared/data/graphs"))
    parser.add_argument("--costs", choices=("p100", "a100"), default="p100")
    parser.add_argument("--only", help="names of graphs, separated by commas")
    parser.add_argument("--ratios", default="0.3,0.4,0.5,0.6,0.7,0.8")
    parser.add_argument("--planners", default="all")
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds per cell")
    parser.add_argument("--memory-gib", type=float, default=16.0, help="of the device, for batch")
    return parser.parse_args()


def files(options: argparse.Namespace) -> Iterator[tuple[str, GraphFile]]:
    """Yield the graphs that were asked for."""
    for name, file in read_graph_folder(options.graphs, options.costs).items():
        if not options.only or name in options.only.split(","):
            yield name, file


def able(graph: Graph, planners: str) -> list[str]:
    """The planners among those named that can plan the graph."""
    chain = is_chain(graph)
    return [
        name
        for name in planners_named(planners)
        if chain or not PLANNERS[name].capabilities.linear_only
    ]


def compare(options: argparse.Namespace) -> None:
    """Every planner at every ratio: Checkmate's figure 4, MONeT's figure 3."""
    rows = Rows("compare")
    limits = Limits(seconds=options.time_limit)
    for name, file in files(options):
        for ratio in map(float, options.ratios.split(",")):
            budget = int(ratio * file.peak_bytes)
            for planner in able(file.graph, options.planners):
                key = {"graph": name, "costs": options.costs, "ratio": ratio, "planner": planner}
                task = Task(graph=file.graph, budget_bytes=budget)
                rows.add(
                    {**key, "time_limit_s": options.time_limit},
                    lambda task=task, planner=planner: as_row(task, planner, limits),
                )


def as_row(task: Task, planner: str, limits: Limits) -> dict[str, Any]:
    """One cell of the comparison; overheads in percent."""
    row = compared(task, planner, limits)
    return {
        "budget_bytes": row.budget_bytes,
        "status": row.status,
        "overhead_percent": percent(row.overhead),
        "bound_percent": percent(row.bound),
        "peak_bytes": row.peak_bytes,
        "seconds": round(row.seconds, 2),
        "bound_source": row.bound_source,
        "note": row.note,
    }


def percent(fraction: float | None) -> float | None:
    """A fraction in percent with four decimals."""
    return None if fraction is None else round(100 * fraction, 4)


def sizes(options: argparse.Namespace) -> None:
    """Variables and constraints of the exact programs: MONeT's table 7."""
    rows = Rows("sizes")
    for name, file in files(options):
        problem = staged(Task(graph=file.graph, budget_bytes=int(0.7 * file.peak_bytes)))
        for planner in ("checkmate", "monet"):
            rows.add(
                {"graph": name, "planner": planner},
                lambda problem=problem, planner=planner: program_size(problem, planner),
            )


def program_size(problem: Staged, planner: str) -> dict[str, Any]:
    """Build a program and count."""
    if planner == "checkmate":
        program = build_checkmate(problem, frontier_stages(problem)).program
    else:
        program = build_monet(problem, one_each(problem)).program
    return {
        "forward_ops": sum(node.is_forward for node in problem.nodes),
        "ops": len(problem.nodes),
        "variables": program.columns,
        "constraints": program.rows,
    }


def memory(options: argparse.Namespace) -> None:
    """The least memory at an overhead of at most 10 %: MONeT's table 1."""
    rows = Rows("memory")
    limits = Limits(seconds=min(options.time_limit, 5.0))
    chosen = ",".join(QUICK) if options.planners == "all" else options.planners
    for name, file in files(options):
        for planner in able(file.graph, chosen):
            key = {"graph": name, "costs": options.costs, "planner": planner}
            rows.add(
                {**key, "time_limit_s": limits.seconds},
                lambda file=file, planner=planner: least_memory(file, planner, limits),
            )


def least_memory(file: GraphFile, planner: str, limits: Limits) -> dict[str, Any]:
    """Bisect the ratio to 1/200 for an overhead of at most 10 %."""
    low, high = 0, 200
    found: float | None = None
    while high - low > 1:
        middle = (low + high) // 2
        task = Task(graph=file.graph, budget_bytes=file.peak_bytes * middle // 200)
        row = compared(task, planner, limits)
        if row.overhead is not None and row.overhead <= 0.1:
            high, found = middle, row.overhead
        else:
            low = middle
    return {
        "ratio": high / 200,
        "activation_bytes": file.peak_bytes * high // 200,
        "eager_bytes": file.peak_bytes,
        "overhead_percent": percent(found if found is not None else 0.0),
    }


def batch(options: argparse.Namespace) -> None:
    """The largest batch at one extra forward pass: Checkmate's figure 6 and equation 7.

    Sizes and costs scale with the batch, constants do not; the memory is the device's less them.
    """
    rows = Rows("batch")
    limits = Limits(seconds=min(options.time_limit, 5.0))
    chosen = ",".join(QUICK) if options.planners == "all" else options.planners
    for name, file in files(options):
        room = int(options.memory_gib * GIB) - file.constant_bytes
        for planner in able(file.graph, chosen):
            key = {"graph": name, "costs": options.costs, "planner": planner}
            rows.add(
                {**key, "memory_gib": options.memory_gib, "time_limit_s": limits.seconds},
                lambda file=file, planner=planner, room=room: largest_batch(
                    file, planner, room, limits
                ),
            )


def largest_batch(file: GraphFile, planner: str, room: int, limits: Limits) -> dict[str, Any]:
    """Bisect how often the file's batch fits with at most one more forward pass of cost.

    A batch b times the file's in `room` bytes is the file's own in ``room / b``.
    """
    segments = file.graph.segments
    costs = [op.alternatives[0].variants[0].cost_s for op in file.graph.ops]
    forward = sum(
        cost
        for cost, op in zip(costs, file.graph.ops, strict=True)
        if segments[op.segment].phase == "forward"
    )
    allowed = forward / sum(costs)
    eager = room / file.peak_bytes
    low, high = 0.0, 12.0 * eager
    best: float | None = None
    while high - low > 0.01 * eager:
        middle = (low + high) / 2
        row = compared(Task(graph=file.graph, budget_bytes=int(room / middle)), planner, limits)
        if row.overhead is not None and row.overhead <= allowed:
            low, best = middle, row.overhead
        else:
            high = middle
    return {
        "times_file_batch": round(low, 3),
        "times_eager_batch": round(low / eager, 3),
        "overhead_percent": percent(best),
        "allowed_percent": percent(allowed),
    }


if __name__ == "__main__":
    main()
