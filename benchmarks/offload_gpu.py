"""Models of the zoo on a GPU within a budget, with moves to the host's memory and without.

    python benchmarks/offload_gpu.py
    python benchmarks/offload_gpu.py --table

Plain PyTorch first, then at each budget recomputing alone (`recompute`) and with moves
(`offload`). A row each: the time of steps in a row as a share of plain PyTorch's, bytes moved, and
how long operators wait for that, as planned and as measured. After `--time-limit` seconds no
further fit begins. Rows go to ``benchmarks/results/offload_gpu.jsonl``, each as soon as it is
there. Exits with 1 if a step held more than its budget, or failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import tightfit
from benchmarks.gpu_limit import Training, plain
from benchmarks.rows import Row, append_rows, read_rows
from benchmarks.training import circumstances
from tightfit.errors import BadInput, InfeasibleBudget, TightfitError

__all__ = ["ROWS", "table"]

ROWS = Path(__file__).resolve().parent / "results" / "offload_gpu.jsonl"
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"batch": 8, "sequence": 1024, "dropout": 0.0},
    "resnet50": {"batch": 128, "size": 224},
}
WAYS = ("recompute", "offload")
FAR = "24GiB"
SETTLED = 4  # steps after which plans leave what the allocator loses
SEARCH_S = 3.0  # at most: the first plans are what a user trains with


def training_of(model: str, options: argparse.Namespace) -> Training:
    """Return a model, an optimizer and a batch."""
    settings = dict.fromkeys(("batch", "size", "sequence", "dropout")) | MODELS[model]
    if options.batch is not None:
        settings["batch"] = options.batch
    return Training(argparse.Namespace(model=model, device=options.device, **settings))


def fitted(model: str, ratio: float, way: str, before: Row, options: argparse.Namespace) -> Row:
    """Return the row of a model within a share of plain PyTorch's activations."""
    training = training_of(model, options)
    budget = training.budget_bytes(ratio, before)
    row: Row = {"way": way, "budget_bytes": budget, "budget_ratio": ratio}
    training.return_cached()
    keywords = {"offload": FAR} if way == "offload" else {}
    keywords |= {"optimizer": training.optimizer, "limits": (SEARCH_S, 0.01)}
    began = time.perf_counter()
    try:
        tightfit.fit(training.model, budget, **keywords)
        training.step()
        row["first_s"] = time.perf_counter() - began
        training.settle(SETTLED, SEARCH_S)
        seconds, enqueue_s = training.seconds(options.steps)
        report = tightfit.report(training.model)
    except (TightfitError, torch.OutOfMemoryError) as error:
        row |= {"error": f"{type(error).__name__}: {error}"}
        row["infeasible"] = isinstance(error, InfeasibleBudget)
        return row
    finally:
        with contextlib.suppress(BadInput):  # if fitting it has failed
            tightfit.unfit(training.model)
    return {
        **row,
        "step_s": seconds,
        "enqueue_s": enqueue_s,
        "time_ratio": seconds / before["step_s"],
        "overhead": report.overhead,
        "bound": report.bound,
        "planned_bytes": report.planned_peak_bytes,
        "peak_bytes": report.measured_peak_bytes,
        **{f"planned_{name}": value for name, value in _moved(report.moves).items()},
        **_moved(report.measured_moves),
    }


def _moved(moved: Any) -> Row:
    names = ("stored_bytes", "loaded_bytes", "far_bytes", "stall_s")
    return {name: 0 if moved is None else getattr(moved, name) for name in names}


def holds(row: Row) -> bool:
    """Whether a row is as promised; recomputing alone need not fit every budget."""
    if "error" in row:
        return row["infeasible"] and row["way"] == "recompute"
    return row["way"] == "plain" or row["peak_bytes"] <= row["budget_bytes"]


def table(rows: Sequence[Row]) -> str:
    """Return rows as Markdown."""
    lines = [
        "| step | share | way | peak / budget | planned time | measured time | moved | waits, "
        "planned | waits, measured |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        if row["way"] == "plain":
            continue
        head = f"| {row['model']} | {row['budget_ratio']} | {row['way']} |"
        if "error" in row:
            lines.append(f"{head} {row['error'].split('. ')[0][:80]} |" + " |" * 5)
            continue
        lines.append(
            f"{head} {row['peak_bytes'] / row['budget_bytes']:.3f} | {1 + row['overhead']:.3f} | "
            f"{row['time_ratio']:.3f} | {row['stored_bytes'] / 2**20:.0f} MiB | "
            f"{1e3 * row['planned_stall_s']:.1f} ms | {1e3 * row['stall_s']:.1f} ms |"
        )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, append the rows; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ratios", default="0.5,0.3", help="of plain PyTorch's activations")
    parser.add_argument("--batch", type=int, help="instead of each model's own")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, default=ROWS)
    parser.add_argument("--table", action="store_true", help="only print the rows as a table")
    options = parser.parse_args(words)
    if options.table:
        print(table(read_rows(options.output)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TIGHTFIT_CACHE_DIR"] = folder  # costs of a model are measured once
        rows = _measured(options)
    print(table(rows))
    return 0 if all(map(holds, rows)) else 1


def _measured(options: argparse.Namespace) -> list[Row]:
    """Append and return the rows that there is time for."""
    ends = time.perf_counter() + options.time_limit
    far = tightfit.Offload(FAR).far(torch.device(options.device))
    common = {
        "link": [far.store_bytes_per_s, far.load_bytes_per_s, far.latency_s],
        **circumstances(torch.get_num_threads(), options.steps, options.device),
    }
    rows: list[Row] = []

    def add(model: str, row: Row) -> Row:
        rows.append({"model": model, "settings": MODELS[model], **row, **common})
        append_rows(options.output, rows[-1])
        return row

    models = options.models.split(",")
    before = {m: add(m, plain(training_of(m, options), options.steps)) for m in models}
    for ratio in map(float, options.ratios.split(",")):
        for model in models:
            for way in WAYS[::-1]:
                if time.perf_counter() < ends:
                    add(model, fitted(model, ratio, way, before[model], options))
    return rows


if __name__ == "__main__":
    sys.exit(main())
