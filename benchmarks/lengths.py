"""How soon a step at a new length of input starts, and what its first plan costs more.

    python benchmarks/lengths.py --ratio 0.7

GPT-2 small of the zoo trains on texts of many lengths under one budget: that share of the
activation peak at the longest. A row says what the first call at a length takes beyond a call
whose plan is there (capture, costs, plan, lowering), and the overhead of the plan at once and of
the one found in the background. Rows go to ``benchmarks/results/lengths.jsonl``; ``--table``
writes ``docs/lengths.md`` from them.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import tightfit
from benchmarks.rows import append_rows, read_rows
from benchmarks.training import circumstances
from tightfit.execution.attach import attached
from tightfit.graph.liveness import budget_of_ratio
from tightfit.session.fitted import Fitted
from tightfit.zoo.gpt2 import GPT2

HERE = Path(__file__).parent
ROWS = HERE / "results" / "lengths.jsonl"
PAGE = HERE.parent / "docs" / "lengths.md"
LENGTHS = (256, 128, 192, 96, 224, 64, 160, 240)
BATCH, VOCABULARY = 4, 8192


def main() -> None:
    """Measure, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ratio", type=float, default=0.7)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        measure(options.ratio)
    write_page(read_rows(ROWS))


def measure(ratio: float) -> None:
    """Train one step after the other at every length; append a row for each."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT2(vocabulary=VOCABULARY)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    planless = tightfit.fit(copy.deepcopy(model), "64GiB", optimizer=optimizer, costs="unit")
    tightfit.prepare(planless, *texts(max(LENGTHS)))
    budget_bytes = budget_of_ratio(attached(planless).last.graph, ratio)
    tightfit.fit(model, budget_bytes, optimizer=optimizer, cache=False)
    ROWS.write_text("")
    for length in LENGTHS:
        row = one_length(model, optimizer, length)
        machine = circumstances(torch.get_num_threads(), rounds=1)
        append_rows(ROWS, {**machine, "ratio": ratio, **row})
        print(row, flush=True)


def one_length(model: Any, optimizer: Any, length: int) -> dict[str, Any]:
    """Take steps at one length until the plan found in the background runs."""
    session: Fitted = attached(model)
    first = step(model, optimizer, length)
    at_once = session.last.outcome
    for shape in session.specialisations:
        for search in shape.searches.values():
            search.wait()
    later = min((step(model, optimizer, length) for _ in range(3)), key=lambda s: s["wall_s"])
    peaks = session.close_step()
    return {
        "length": length,
        "start_s": round(first["processor_s"] - later["processor_s"], 2),
        "start_wall_s": round(first["wall_s"] - later["wall_s"], 2),
        "overhead_at_once": at_once.overhead,
        "overhead_found": session.last.outcome.overhead,
        "budget_bytes": session.options.budget_bytes,
        "measured_peak_bytes": max(p.peak_bytes for p in [*session.guard.steps[-3:], peaks]),
    }


def step(model: Any, optimizer: Any, length: int) -> dict[str, float]:
    """Take one training step; return what the forward call took."""
    tokens = texts(length)
    wall, processor = time.perf_counter(), time.thread_time()
    loss = model(*tokens)
    took = {"wall_s": time.perf_counter() - wall, "processor_s": time.thread_time() - processor}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return took


def texts(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets [4, length]."""
    return tuple(torch.randint(0, VOCABULARY, (BATCH, length)) for _ in range(2))  # type: ignore


def write_page(rows: list[dict[str, Any]]) -> None:
    """Write docs/lengths.md."""
    loads = [row["load"] for row in rows]
    lines = [
        "# Inputs of many lengths",
        "",
        "A plan holds for one shape of inputs. The first call waits for the trace, for each "
        "operator to have run once where nothing is known of it, and for a plan found in a "
        "moment. Every further shape starts with costs scaled from the nearest known shape and "
        "the best of the plans that need no search. These are an earlier process's, a greedy "
        "plan and those of other shapes, each verified. A better plan is searched in another "
        "process of low priority, which takes neither the interpreter's lock nor a core from "
        "the steps, and takes over between two of them. `fit(..., shapes=[...])` plans expected "
        "shapes beforehand, the largest first, so that a budget too small shows at once. The 16 "
        "shapes used last keep their plans.",
        "",
        "A graph network whose batches all differ needs another plan in each call. After six "
        "such calls in a row, a further one runs as plain PyTorch where that is expected to "
        "fit. That is announced once. A shape that comes again is planned.",
        "",
        f"Generated by `python benchmarks/lengths.py --table`; do not edit. GPT-2 small (12 "
        f"layers, vocabulary {VOCABULARY}), batch {BATCH}, dropout 0.1, budget "
        f"{rows[0]['ratio']:.0%} of the activation peak at the longest text, one thread, load of "
        f"the machine {min(loads)} to {max(loads)}. *Start* is the time of the first call beyond "
        "a later call: capture, costs, plan and lowering, processor time.",
        "",
        "| length | start (s) | overhead at once (%) | overhead found (%) | measured / budget |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['length']} | {row['start_s']:.1f} | {100 * row['overhead_at_once']:+.2f} | "
            f"{100 * row['overhead_found']:+.2f} | "
            f"{row['measured_peak_bytes'] / row['budget_bytes']:.4f} |"
        )
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
