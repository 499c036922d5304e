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
from benchmarks.training import circumstances, let_search_end
from tightfit.errors import InfeasibleBudget
from tightfit.plan.simulate import simulate
from tightfit.studies.comparison import Comparison
from tightfit.studies.subject import with_loss_inside
from tightfit.zoo import Example, make

ROWS = Path(__file__).parent / "results" / "offload_measured.jsonl"
MODELS: dict[str, Callable[[], Example]] = {
    "resnet50": lambda: make("resnet50", batch=16, size=128),
    "unet": lambda: make("unet", batch=2, size=96),
    "gpt2": lambda: make("gpt2", batch=4, sequence=256, dropout=0.0),
}
WAYS = ("recompute", "offload")
MOST_STEPS = 30  # until costs are known


class _Way:
    """A model that trains in one way."""

    def __init__(self, model: str, seconds: float, folder: str | None, way: str) -> None:
        keywords: dict[str, Any] = {"cache": False, "limits": (seconds, 1e-3)}
        if way == "offload":
            keywords["offload"] = tightfit.Offload("16GiB", folder)
        torch.manual_seed(0)
        example = with_loss_inside(MODELS[model]())
        self.comparison = Comparison(example, steps=2, name=model, **keywords)
        self.times: list[float] = []
        self.row: dict[str, Any] = {}

    def prepare(self, budget_bytes: int) -> None:
        """Train within a budget until the final plan is there; note what is compared."""
        comparison = self.comparison
        first = comparison.at(budget_bytes, rounds=0)
        fitted = comparison.within(budget_bytes)
        for _ in range(MOST_STEPS):
            self.step()
            if not fitted.is_tuning:
                break
        let_search_end()
        self.step()
        last = comparison.at(budget_bytes, rounds=0)
        self.row = {
            "bitwise": first.bitwise and last.bitwise,
            "peak_bytes": max(first.measured_peak_bytes, last.measured_peak_bytes),
        }

    def step(self, *, plainly: bool = False) -> float:
        """Run forward and backward; return the wall time."""
        subject = self.comparison.subject
        subject.model.zero_grad(set_to_none=True)
        gc.collect()
        began = time.perf_counter()
        if plainly:
            subject.loss_of(*subject.args, **subject.kwargs).backward()
            return time.perf_counter() - began
        with self.comparison.fitted():
            began = time.perf_counter()
            subject.loss_of(*subject.args, **subject.kwargs).backward()
            return time.perf_counter() - began

    def found(self, budget_bytes: int) -> dict[str, Any]:
        """Return what is known of the plan, and of its last step."""
        fitted = self.comparison.within(budget_bytes)
        self.step()
        let_search_end()
        self.step()
        self.step()
        fitted.close_step()
        report, last = fitted.report(), fitted.last
        assert last is not None and report.plan is not None
        result = simulate(last.graph, report.plan)
        row = {
            "overhead": report.overhead,
            "bound": report.bound,
            "planned_s": result.time_s,
            "baseline_s": result.baseline_cost_s,
            "planned_peak_bytes": report.planned_peak_bytes,
            "recomputed": sum(times for _, times in result.recomputed),
            "moved_bytes": result.moved_bytes,
            "far_bytes": result.far_peak_bytes,
            "planned_stall_s": result.stall_s,
        }
        if report.measured_moves is not None:
            row["stall_s"] = report.measured_moves.stall_s
        return self.row | row | {"step_s": statistics.median(self.times)}


def measured(model: str, ratio: float, options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a cell."""
    torch.set_num_threads(options.threads)
    ways = {way: _Way(model, options.time_limit, options.folder, way) for way in WAYS}
    eager = ways["recompute"].comparison.eager
    budget_bytes = ways["recompute"].comparison.budget_of(ratio)
    row: dict[str, Any] = {
        "model": model,
        "ratio": ratio,
        "budget_bytes": budget_bytes,
        "plain_peak_bytes": eager.peak_bytes,
        "constant_bytes": eager.constant_bytes,
    }
    errors: dict[str, str] = {}
    for name, way in ways.items():
        try:
            way.prepare(budget_bytes)
        except InfeasibleBudget as error:
            errors[name] = str(error).splitlines()[0]
    plain: list[float] = []
    for number in range(options.rounds):
        plain.append(ways["recompute"].step(plainly=True))
        for name in WAYS if number % 2 else WAYS[::-1]:
            if name not in errors:
                ways[name].times.append(ways[name].step())
    row["plain_s"] = statistics.median(plain)
    for name, way in ways.items():
        row[name] = {"error": errors[name]} if name in errors else way.found(budget_bytes)
    far = tightfit.Offload("16GiB", options.folder).far()
    row["link"] = [far.store_bytes_per_s, far.load_bytes_per_s, far.latency_s]
    return row | circumstances(options.threads, options.rounds)


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
                f"{1e3 * found.get('stall_s', 0.0):.0f} ms |"
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
    parser.add_argument("--folder", help="where far memory lies")
    parser.add_argument("--one", action="store_true", help="print the row of one cell")
    parser.add_argument("--table", action="store_true", help="only print the rows as a table")
    options = parser.parse_args()
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
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
                own = ["--one", "--models", model, "--ratios", ratio]
                line = subprocess.run(
                    [sys.executable, __file__, *own, *sys.argv[1:], *own],
                    check=True,
                    stdout=subprocess.PIPE,
                    text=True,
                ).stdout.splitlines()[-1]
                print(line, flush=True)
                with ROWS.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
