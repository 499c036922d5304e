"""Memory and time of training steps and of inference: no pool, the stock pool, an arena.

    python benchmarks/pools.py

What Figures 2 to 4 of Sekiyama et al. 2018 show, on a CPU: the peak of what the process holds above
what it held before the model was made, processor time of a mini-batch, both for mini-batches of
varying length, the throughput at the larger batch that an arena has room for, and how long it takes
to lay a step out. Without a pool, blocks above 256 KiB are given back as soon as they are freed;
the stock pool is the C library as it comes. Each training runs in a process of its own. Rows go to
``benchmarks/results/pools.jsonl``; ``--table`` only writes ``docs/pools.md``.
"""

from __future__ import annotations

import contextlib
import gc
import random
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tightfit
from benchmarks.arena import highest
from benchmarks.arena_models import InceptionResNet, Translator, alexnet
from benchmarks.documents import table
from benchmarks.processes import in_its_process
from benchmarks.rows import BenchmarkPage, Row
from tightfit.allocator import record, resident_bytes
from tightfit.allocator.replay import return_large_blocks_at_once
from tightfit.arenas.sequence import sequenced
from tightfit.layout.blocks import Block
from tightfit.layout.pack import pack
from tightfit.zoo import make

__all__ = ["BENCHMARK_PAGE", "document"]

HERE = Path(__file__).resolve().parent
ROWS = HERE / "results" / "pools.jsonl"
PAGE = HERE.parent / "docs" / "pools.md"
MIB = 1 << 20

IMAGES = {"alexnet": 224, "googlenet": 128, "resnet50": 128, "inception_resnet": 149}
BATCHES = {"alexnet": 16, "googlenet": 8, "resnet50": 8, "inception_resnet": 4, "seq2seq": 16}
WORDS = 8000
LENGTH = 30
LENGTHS = [10, 15, 20, 25, 30, 35, 40]
WAYS = ("no pool", "stock pool", "arena")
STEPS, WARM_UP = 10, 4
VARYING_STEPS = 42
SHOWN = (1, 7, 14, 21, 28, 42)
LAID_OUT = (1, 8, 16)

Batch = tuple[Tensor, ...]


def measure() -> None:
    """Append all rows."""
    for name in BATCHES:
        for phase in ("training", "inference"):
            for way in WAYS:
                batch = BATCHES[name] if phase == "training" else 1
                BENCHMARK_PAGE.append(in_its_process(fixed, name, phase, way, batch))
    for way in WAYS:
        BENCHMARK_PAGE.append(in_its_process(varying, way))
    BENCHMARK_PAGE.append(in_its_process(larger_batch, "resnet50"))
    for name in BATCHES:
        for batch in LAID_OUT:
            BENCHMARK_PAGE.append(in_its_process(laying_out, name, batch))


def model_of(name: str) -> nn.Module:
    """Return a model, initialised the same each time."""
    torch.manual_seed(0)
    if name == "alexnet":
        return alexnet()
    if name == "inception_resnet":
        return InceptionResNet()
    return Translator(WORDS) if name == "seq2seq" else make(name, 1)[0]


def batch_of(name: str, batch: int, length: int = LENGTH) -> tuple[Batch, Tensor]:
    """Return inputs and targets."""
    if name == "seq2seq":
        source, written = torch.randint(0, WORDS, (2, batch, length))
        return (source, written), torch.randint(0, WORDS, (batch * length,))
    size = IMAGES[name]
    return (torch.randn(batch, 3, size, size),), torch.randint(0, 1000, (batch,))


class Loop:
    """Training or inference in one of the ways, step by step."""

    def __init__(self, name: str, phase: str, way: str) -> None:
        self.before = resident_bytes()
        self.model = model_of(name)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.trains = phase == "training"
        self.model.train(self.trains)
        self.ways = contextlib.ExitStack()
        self.arena = self.ways.enter_context(tightfit.arena()) if way == "arena" else None
        if way == "no pool":
            return_large_blocks_at_once(True)

    def step(self, inputs: Batch, target: Tensor) -> None:
        """Take one step; what differs in size is named by its inputs."""
        if self.arena is not None:
            self.arena.step(inputs[0].shape)
        if not self.trains:
            with torch.no_grad():
                self.model(*inputs)
            return
        logits = self.model(*inputs)
        F.cross_entropy(logits.reshape(len(target), -1), target).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def fixed(name: str, phase: str, way: str, batch: int) -> Row:
    """Take steps on mini-batches of one size."""
    loop = Loop(name, phase, way)
    given = batch_of(name, batch)
    spent: list[float] = []
    faults: list[int] = []
    with highest() as take, loop.ways:
        for number in range(STEPS):
            if number == WARM_UP:
                take()
            before, started = _faults(), time.process_time()
            loop.step(*given)
            spent.append(time.process_time() - started)
            faults.append(_faults() - before)
        most = take()
    return {
        "kind": "fixed",
        "model": name,
        "phase": phase,
        "way": way,
        "batch": batch,
        "held_bytes": most - loop.before,
        "step_s": statistics.median(spent[WARM_UP:]),
        "faults": statistics.median(faults[WARM_UP:]),
    }


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def varying(way: str) -> Row:
    """Train on mini-batches of varying length; the most held until each of some steps."""
    loop = Loop("seq2seq", "training", way)
    lengths = random.Random(0).choices(LENGTHS, k=VARYING_STEPS)
    held: list[int] = []
    started = time.process_time()
    with highest() as take, loop.ways:
        for length in lengths:
            loop.step(*batch_of("seq2seq", BATCHES["seq2seq"], length))
            held.append(max([*held, take() - loop.before]))
    return {
        "kind": "varying",
        "way": way,
        "held_bytes": [held[step - 1] for step in SHOWN],
        "seconds": time.process_time() - started,
    }


def larger_batch(name: str) -> Row:
    """Find the batch that an arena has room for where the stock pool holds the usual one."""
    usual = BATCHES[name]
    stock = in_its_process(fixed, name, "training", "stock pool", usual)
    small = in_its_process(fixed, name, "training", "arena", usual)
    parameters = 4 * sum(p.numel() for p in model_of(name).parameters())
    each = (small["held_bytes"] - parameters) / usual
    batch = int((stock["held_bytes"] - parameters) / each)
    large = in_its_process(fixed, name, "training", "arena", batch)
    while large["held_bytes"] > stock["held_bytes"]:
        batch -= 1
        large = in_its_process(fixed, name, "training", "arena", batch)
    return {"kind": "larger", "model": name, "rows": [stock, small, large]}


def laying_out(name: str, batch: int) -> Row:
    """Record a training step and lay it out."""
    loop = Loop(name, "training", "stock pool")
    given = batch_of(name, batch)
    for _ in range(2):
        loop.step(*given)
    gc.collect()
    with record() as recorder:
        loop.step(*given)
    recording = recorder.recording
    started = time.process_time()
    laid_out = sequenced(recording)
    whole_s = time.process_time() - started
    blocks = [b for b in laid_out.blocks if b.lower < b.upper]
    return {
        "kind": "layout",
        "model": name,
        "batch": batch,
        "blocks": len(blocks),
        "paper_s": _packing_s(blocks, "paper"),
        "default_s": _packing_s(blocks, "auto"),
        "whole_s": whole_s,
        "ratio": laid_out.height_bytes / laid_out.lower_bound_bytes,
    }


def _packing_s(blocks: Sequence[Block], packer: str) -> float:
    started = time.process_time()
    pack(blocks, packer)
    return time.process_time() - started


def document(rows: Sequence[Row]) -> str:
    """The page as Markdown."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kinds.setdefault(row["kind"], []).append(row)
    parts = [
        "# Pools",
        "Generated by `python benchmarks/pools.py` from rows in `benchmarks/results/`; do not "
        "edit. Figures 2 to 4 of Sekiyama et al. 2018 (arXiv 1804.10001), repeated on a CPU: one "
        "thread of a machine that other work shared, plain PyTorch, plain SGD. Held: the most "
        "that is resident above the bytes before the model was made. Without a pool, blocks above "
        "256 KiB are given back as soon as they are freed; the stock pool is the C library.",
        "## Memory and time (Figures 2 and 3)\n\nSeconds: processor time of a mini-batch, median. "
        "Share: the arena / the stock pool.",
        _fixed_table(kinds["fixed"]),
        "## Mini-batches of varying length\n\nseq2seq; MiB held at most until a step, and seconds "
        f"of processor time for {VARYING_STEPS} steps, those included in which the arena records "
        f"each of {len(LENGTHS)} lengths.",
        table(
            ["way", *(f"step {step}" for step in SHOWN), "seconds"],
            [
                [row["way"], *(_mib(held) for held in row["held_bytes"]), f"{row['seconds']:.1f}"]
                for row in kinds["varying"]
            ],
        ),
        "## The batch that fits\n\nWhere the stock pool holds the first row, an arena has room for "
        "the last one.",
        table(
            ["model", "way", "batch", "held (MiB)", "samples / s"],
            [
                [
                    found["model"],
                    row["way"],
                    str(row["batch"]),
                    _mib(row["held_bytes"]),
                    f"{row['batch'] / row['step_s']:.2f}",
                ]
                for found in kinds["larger"]
                for row in found["rows"]
            ],
        ),
        "## Laying a step out (Figure 4)\n\nMilliseconds of processor time: the paper's heuristic, "
        "the default packer, and everything between a recorded step and a layout that is replayed. "
        "The last is what planning a changed step again takes. Ratio: height / largest load.",
        table(
            ["model", "batch", "blocks", "paper", "default", "everything", "ratio"],
            [
                [
                    row["model"],
                    str(row["batch"]),
                    str(row["blocks"]),
                    *(f"{1000 * row[key]:.1f}" for key in ("paper_s", "default_s", "whole_s")),
                    f"{row['ratio']:.4f}",
                ]
                for row in kinds["layout"]
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _fixed_table(rows: Sequence[Row]) -> str:
    header = ["model", "phase", "batch", *(f"{way} (MiB)" for way in WAYS), "share"]
    header += [*(f"{way} (s)" for way in WAYS), "share"]
    found: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows:
        key = row["model"], row["phase"], row["batch"]
        found.setdefault(key, {})[row["way"]] = row
    lines = []
    for (model, phase, batch), ways in found.items():
        held = [ways[way]["held_bytes"] for way in WAYS]
        spent = [ways[way]["step_s"] for way in WAYS]
        lines.append(
            [
                *(model, phase, str(batch)),
                *(_mib(value) for value in held),
                f"{held[2] / held[1]:.2f}",
                *(f"{value:.3f}" for value in spent),
                f"{spent[2] / spent[1]:.2f}",
            ]
        )
    return table(header, lines)


def _mib(value: float) -> str:
    return f"{value / MIB:.1f}"


BENCHMARK_PAGE = BenchmarkPage(ROWS, PAGE, document)

if __name__ == "__main__":
    torch.set_num_threads(1)
    BENCHMARK_PAGE.main(__doc__, measure)
