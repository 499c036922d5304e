"""Train a model of the zoo under a budget that the device keeps: what it reserves, and how fast.

    python benchmarks/gpu_limit.py resnet50 --ratio 0.4 --batch 128 --size 224 --device cuda

Plain PyTorch first, then fitted in each of the ways: `limit`, as `fit` does it; `warn`, without a
limit; `arena`, at planned addresses. A row each: reserved bytes as a share of the budget, retries
of the allocator once plans are settled, and the time of steps in a row, with what of it the
processor took to ask for them. Exits with 1 if more was reserved than the budget, or with retries.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import tightfit
from benchmarks.rows import Row, append_rows
from benchmarks.training import circumstances, let_search_end
from tightfit.allocator import measure_peak, meter_for
from tightfit.allocator.caching import return_cached
from tightfit.errors import BadInput, TightfitError
from tightfit.zoo import make

__all__ = ["ROWS", "table"]

ROWS = Path(__file__).resolve().parent / "results" / "gpu_limit.jsonl"
SETTLED = 15  # steps after which plans leave what the allocator loses
SEARCH_S = 6.0  # at most: the first plans are what a user trains with
WAYS = {"limit": {}, "warn": {"on_exceed": "warn"}, "arena": {"arena": True}}


class Training:
    """A model, an optimizer and a batch on a device."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        keys = ("batch", "size", "sequence", "dropout")
        self.settings = {k: v for k in keys if (v := getattr(arguments, k)) is not None}
        self.device = torch.device(arguments.device)
        self.example = make(arguments.model, **self.settings).to(self.device)
        self.model = self.example.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)

    def step(self) -> None:
        """Take a step."""
        args = self.example.args
        output = self.model(**args) if isinstance(args, dict) else self.model(*args)
        loss_of = self.example.loss
        loss = output if loss_of is None else loss_of(output, self.example.target)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def budget_bytes(self, ratio: float, plain: Row) -> int:
        """Return the model, its optimizer's state and a share of plain PyTorch's activations."""
        state_bytes = sum(p.nbytes for p in self.model.parameters())
        return self.model_bytes() + state_bytes + round(ratio * plain["peak_bytes"])

    def model_bytes(self) -> int:
        """Return the bytes of parameters and buffers."""
        return sum(t.nbytes for t in (*self.model.parameters(), *self.model.buffers()))

    def settle(self, steps: int, search_s: float) -> None:
        """Take steps before and after waiting `search_s` seconds for better plans."""
        for _ in range(steps):
            self.step()
        let_search_end(search_s)
        for _ in range(steps):
            self.step()

    def seconds(self, steps: int) -> tuple[float, float]:
        """Return the seconds of a step in a row, and until its last kernel is enqueued."""
        self._wait()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        enqueued = time.perf_counter() - began
        self._wait()
        return (time.perf_counter() - began) / steps, enqueued / steps

    def retries(self) -> int:
        """Return how often the allocator has emptied its cache to retry a request."""
        if self.device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self.device)["num_alloc_retries"])

    def reserved_bytes(self) -> int:
        """Return what the allocator has reserved on the device; 0 on a CPU."""
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0

    def return_cached(self) -> None:
        """Return cached memory of earlier trainings to the device."""
        gc.collect()
        return_cached(self.device)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def plain(training: Training, steps: int) -> Row:
    """Return the row of plain PyTorch."""
    for _ in range(3):
        training.step()
    resident_bytes = meter_for(training.device).live_bytes()
    _, peak = measure_peak(training.step, device=training.device)
    seconds, enqueue_s = training.seconds(steps)
    return {
        "way": "plain",
        "resident_bytes": resident_bytes,
        "peak_bytes": peak.peak_bytes,
        "step_s": seconds,
        "enqueue_s": enqueue_s,
        "reserved_bytes": training.reserved_bytes(),
    }


def fitted(arguments: argparse.Namespace, way: str, before: Row) -> Row:
    """Return the row of a fitted model."""
    training = Training(arguments)
    budget = training.budget_bytes(arguments.ratio, before)
    row: Row = {"way": way, "budget_bytes": budget, "budget_ratio": arguments.ratio}
    training.return_cached()
    others = max(0, training.reserved_bytes() - training.model_bytes())
    began = time.perf_counter()
    try:
        tightfit.fit(training.model, budget, optimizer=training.optimizer, cache=False, **WAYS[way])
        training.step()
        row["first_s"] = time.perf_counter() - began
        training.settle(SETTLED, SEARCH_S)
        retries = training.retries()
        seconds, enqueue_s = training.seconds(arguments.steps)
    except (TightfitError, torch.OutOfMemoryError) as error:
        with contextlib.suppress(BadInput):  # if fitting it has failed
            tightfit.unfit(training.model)
        return {**row, "error": f"{type(error).__name__}: {error}"}
    report = tightfit.report(training.model)
    reserved_bytes = training.reserved_bytes() - others
    tightfit.unfit(training.model)  # and its limit ends
    return {
        **row,
        "step_s": seconds,
        "enqueue_s": enqueue_s,
        "time_ratio": seconds / before["step_s"],
        "retries": training.retries() - retries,
        "reserved_bytes": reserved_bytes,
        "reserved_over": reserved_bytes / budget,
        "planned_bytes": report.planned_peak_bytes,
        "overhead": report.overhead,
        "bound": report.bound,
        **_of_arena(report),
    }


def _of_arena(report: Any) -> Row:
    arena = report.arena
    if arena is None:
        return {}
    return {
        "exact_steps": arena.exact_steps,
        "arena_steps": arena.steps,
        "height_bytes": arena.height_bytes,
    }


def holds(row: Row) -> bool:
    """Whether a row is as promised; plain PyTorch and `warn` have no limit to hold."""
    if row["way"] in ("plain", "warn"):
        return "error" not in row
    return "error" not in row and row["reserved_over"] <= 1.01 and not row["retries"]


def table(rows: Sequence[Row]) -> str:
    """Return rows as a text table."""
    lines = [
        f"{'model':12} {'way':7} {'budget':>7} {'reserved':>9} {'retries':>8} {'time':>7} "
        f"{'planned':>8} {'asking':>9}"
    ]
    for row in rows:
        start = f"{row['model']:12} {row['way']:7} "
        if "error" in row:
            lines.append(start + row["error"].split(". ")[0][:80])
            continue
        ratio = f"{row['budget_ratio']:.2f}" if "budget_ratio" in row else ""
        over = f"{row['reserved_over']:.3f}" if "reserved_over" in row else ""
        lines.append(
            f"{start}{ratio:>7} {over:>9} {row.get('retries', ''):>8} "
            f"{row.get('time_ratio', 1.0):>6.2f}x {row.get('overhead', 0.0):>+8.1%} "
            f"{1e3 * row['enqueue_s']:>6.1f} ms"
        )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, append the rows; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--ratio", type=float, required=True, help="of plain PyTorch's activations")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--size", type=int)
    parser.add_argument("--sequence", type=int)
    parser.add_argument("--dropout", type=float)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=ROWS)
    arguments = parser.parse_args(words)
    training = Training(arguments)
    common = {
        "model": arguments.model,
        "settings": training.settings,
        **circumstances(torch.get_num_threads(), arguments.steps, arguments.device),
    }
    rows = [{**common, **plain(training, arguments.steps)}]
    del training
    append_rows(arguments.output, rows[0])
    for way in arguments.ways.split(","):
        rows.append({**common, **fitted(arguments, way, rows[0])})
        append_rows(arguments.output, rows[-1])
    print(table(rows))
    return 0 if all(map(holds, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
