"""Plans with moves to a file and without, run at the same budgets: bits, peaks, time.

python benchmarks/offload_measured.py --models resnet50,unet,gpt2 --ratios 0.5,0.3
python benchmarks/offload_measured.py --table

One process for each cell. Plain PyTorch, recomputing alone and recomputing with moves take turns;
times are wall times of forward and backward, the median. Bits are compared over two optimizer
steps, and once more by the plan with costs from steps. Rows go to
``benchmarks/results/offload_measured.jsonl``.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import tightfit
from benchmarks.rows import read_rows
from benchmarks.training import circumstances, let_search_end
from tightfit.errors import InfeasibleBudget
from tightfit.plan.simulate import simulate
from tightfit.session.fitted import Fitted
from tightfit.studies.comparison import Comparison
from tightfit.studies.workload import Workload, with_loss_inside
from tightfit.zoo import Example, make

ROWS = Path(__file__).parent / "results" / "offload_measured.jsonl"
MODELS: dict[str, Callable[[], Example]] = {
    "resnet50": lambda: make("resnet50", batch=8, size=224),
    "unet": lambda: make("unet", batch=2, size=192),
    "gpt2": lambda: make("gpt2", batch=4, sequence=256, dropout=0.0),
}
WAYS = ("recompute", "offload")
MOST_STEPS = 30  # until costs are known


class _Cell:
    """A model within a budget, with moves and without."""

    def __init__(self, model: str, ratio: float, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        torch.manual_seed(0)
        self.offload = tightfit.Offload("16GiB", options.folder)
        self.comparison = Comparison(
            with_loss_inside(MODELS[model]()),
            steps=2,
            name=model,
            cache=False,
            limits=(options.time_limit, 1e-3),
            offload=self.offload,
        )
        self.budget_bytes = self.comparison.budget_of(ratio)
        self.fitted = self.comparison.within(self.budget_bytes)
        self.rows: dict[str, dict[str, Any]] = {way: {} for way in WAYS}
        self.times: dict[str, list[float]] = {way: [] for way in (*WAYS, "plain")}

    def use(self, way: str) -> None:
        """Train in one way from now on."""
        offload = self.offload if way == "offload" else None
        self.fitted.change_options(dataclasses.replace(self.fitted.options, offload=offload))

    def compare(self, way: str) -> None:
        """Train two steps from the start; note bits and the peak, or that there is no plan."""
        self.use(way)
        row = self.rows[way]
        try:
            proof = self.comparison.at(self.budget_bytes, rounds=0)
        except InfeasibleBudget as error:
            row["error"] = str(error).splitlines()[0]
            return
        row["bitwise"] = proof.bitwise and row.get("bitwise", True)
        row["peak_bytes"] = max(proof.measured_peak_bytes, row.get("peak_bytes", 0))

    def step(self, way: str) -> float:
        """Run forward and backward; return the wall time."""
        workload = self.comparison.workload
        workload.model.zero_grad(set_to_none=True)
        gc.collect()
        if way == "plain":
            return _wall_s(workload)
        self.use(way)
        with self.comparison.fitted():
            return _wall_s(workload)

    def run(self, rounds: int) -> None:
        """Train until costs and plans are final, then take turns."""
        for way in WAYS:
            self.compare(way)
        able = [way for way in WAYS if "error" not in self.rows[way]]
        for _ in range(MOST_STEPS if able else 0):
            self.step(able[-1])
            if not self.fitted.is_tuning:
                break
        for way in able:
            self.step(way)
            let_search_end()
            self.compare(way)
        for number in range(rounds):
            for way in ("plain", *able) if number % 2 else (*able[::-1], "plain"):
                self.step(way)  # so that the heap is as its own steps leave it
                self.times[way].append(self.step(way))
        for way in able:
            self.step(way)
            self.fitted.close_step()
            self.rows[way] |= _planned(self.fitted)
            self.rows[way]["step_s"] = statistics.median(self.times[way])


def _wall_s(workload: Workload) -> float:
    began = time.perf_counter()
    workload.loss_of(*workload.args, **workload.kwargs).backward()
    return time.perf_counter() - began


def _planned(fitted: Fitted) -> dict[str, Any]:
    """Return what is known of the plan that runs, and of its last step."""
    report, last = fitted.report(), fitted.last
    assert last is not None and report.plan is not None
    result = simulate(last.graph, report.plan)
    moved = report.measured_moves
    return {
        "overhead": report.overhead,
        "bound": report.bound,
        "planned_s": result.time_s,
        "baseline_s": result.baseline_cost_s,
        "planned_peak_bytes": report.planned_peak_bytes,
        "recomputed": sum(times for _, times in result.recomputed),
        "moved_bytes": result.moved_bytes,
        "far_bytes": result.far_peak_bytes,
        "planned_stall_s": result.stall_s,
        "stall_s": 0.0 if moved is None else moved.stall_s,
    }


def measured(model: str, ratio: float, options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a cell."""
    cell = _Cell(model, ratio, options)
    cell.run(options.rounds)
    eager, far = cell.comparison.eager, cell.offload.far()
    return {
        "model": model,
        "ratio": ratio,
        "budget_bytes": cell.budget_bytes,
        "plain_peak_bytes": eager.peak_bytes,
        "constant_bytes": eager.constant_bytes,
        "plain_s": statistics.median(cell.times["plain"]),
        **cell.rows,
        "link": [far.store_bytes_per_s, far.load_bytes_per_s, far.latency_s],
        **circumstances(options.threads, options.rounds),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| step | share | budget | way | peak | bits | planned time | measured time | moved | "
        "waits, planned | waits, measured |",
        "|---" * 11 + "|",
    ]
    for row in rows:
        for way in WAYS:
            found = row[way]
            head = f"| {row['model']} | {row['ratio']} | {row['budget_bytes'] / 2**20:.0f} MiB"
            if "error" in found:
                lines.append(f"{head} | {way} | no plan |" + " |" * 6)
                continue
            lines.append(
                f"{head} | {way} | {found['peak_bytes'] / 2**20:.0f} MiB | "
                f"{'equal' if found['bitwise'] else 'differ'} | {1 + found['overhead']:.3f} | "
                f"{found['step_s'] / row['plain_s']:.3f} | {found['moved_bytes'] / 2**20:.0f} MiB"
                f" | {1e3 * found['planned_stall_s']:.0f} ms | "
                f"{1e3 * found['stall_s']:.0f} ms |"
            )
    return "\n".join(lines)


def main() -> None:
    """Run every cell whose row is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ratios", default="0.5,0.3")
    parser.add_argument("--time-limit", type=float, default=15.0, help="seconds per plan")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", help="of the file of far memory")
    parser.add_argument("--one", action="store_true", help="print the row of one cell")
    parser.add_argument("--table", action="store_true", help="only print the rows as a table")
    options = parser.parse_args()
    rows = read_rows(ROWS)
    if options.table:
        print(table(rows))
        return
    if options.one:
        print(json.dumps(measured(options.models, float(options.ratios), options)))
        return
    done = {(row["model"], row["ratio"], row["threads"]) for row in rows}
    for model in options.models.split(","):
        for ratio in options.ratios.split(","):
            if (model, float(ratio), options.threads) not in done:
                own = ["--one", "--models", model, "--ratios", ratio]  # what comes last counts
                line = subprocess.run(
                    [sys.executable, __file__, *sys.argv[1:], *own],
                    check=True,
                    stdout=subprocess.PIPE,
                    text=True,
                ).stdout.splitlines()[-1]
                print(line, flush=True)
                with ROWS.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
