"""Programs without a graph in a budget: slowdowns, cost of an operator, sizes.

python benchmarks/online.py [rows ...]

Rows are ``slowdown``, ``overhead`` and ``largest``; all by default. Writes
``benchmarks/results/online.jsonl`` and ``docs/online.md``. Times are processor time of one thread.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tightfit
from benchmarks.documents import table
from benchmarks.online_models import (
    PROGRAMS,
    Program,
    lstm,
    mlp,
    resnet,
    treelstm,
)
from benchmarks.rows import Row, read_rows, write_rows
from tightfit.allocator import CpuMeter
from tightfit.dynamic.room import allocated_bytes, storages_alive
from tightfit.errors import BudgetExceeded, InfeasibleBudget
from tightfit.files import write_atomically
from tightfit.units import format_bytes

__all__ = ["document"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "online.jsonl"
PAGE = ROOT / "docs" / "online.md"
CORES: tuple[Literal["C++", "Python"], ...] = ("C++", "Python")
RATIOS = (0.9, 0.7, 0.5, 0.4, 0.3)
STEPS = 3
MOST_AGAIN = 4.0
MEASURED_AGAIN = 3


def digest(tensor: torch.Tensor) -> str:
    """Return what two tensors share if they have the same bits; takes none of the budget."""
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()


class Run:
    """A program with its optimizer, and what a step of it takes in plain PyTorch."""

    def __init__(self, make: Callable[[], Program]) -> None:
        torch.manual_seed(0)
        self.model, self.loss_of = make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.results: list[str] = []

    def train(self) -> float:
        """Train; return the seconds of processor time."""
        torch.manual_seed(1)
        started = time.process_time()
        for step in range(STEPS):
            self.step(step)
        self.finish()
        return time.process_time() - started

    def step(self, number: int) -> None:
        """Take a step."""
        loss = self.loss_of(number)
        loss.backward()
        self.results.append(digest(loss))
        del loss
        gradients = (p.grad for p in self.model.parameters())
        self.results += [digest(gradient) for gradient in gradients if gradient is not None]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self) -> None:
        """Note what has become of the model and of the random state."""
        self.results += map(digest, self.model.state_dict().values())
        self.results.append(digest(torch.get_rng_state()))

    def activation_bytes(self, numbers: Iterable[int] = range(STEPS)) -> int:
        """Return the most that a step from the second on holds above what is there before it."""
        torch.manual_seed(1)
        meter = CpuMeter()
        most_bytes = 0
        for before, step in enumerate(numbers):
            gc.collect()
            meter.reset_peak()
            idle_bytes = meter.live_bytes()
            self.loss_of(step).backward()
            if before:
                most_bytes = max(most_bytes, meter.peak_bytes() - idle_bytes)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return most_bytes

    def budget_bytes(self, activation_bytes: int, ratio: float) -> int:
        """Return a budget for all there is, momentum and a share of the activations."""
        gc.collect()
        momentum_bytes = sum(p.nbytes for p in self.model.parameters())
        before_bytes = sum(map(allocated_bytes, storages_alive()))
        return before_bytes + momentum_bytes + int(ratio * activation_bytes)


def slowdowns() -> Iterator[Row]:
    """Yield a row for each program and ratio."""
    for name, make in PROGRAMS.items():
        Run(make).train()  # warms kernels up
        plain = Run(make)
        plain_s = plain.train()
        activation_bytes = Run(make).activation_bytes()
        for ratio in RATIOS:
            runs = [
                _in_a_budget(make, plain, plain_s, activation_bytes, ratio)
                for _ in range(MEASURED_AGAIN)
            ]
            assert all(run["within"] and run["bitwise"] is not False for run in runs)
            least = min(runs, key=lambda run: sum(run["shares"].values()))  # least disturbed
            yield {"kind": "slowdown", "program": name, "ratio": ratio} | least


def _in_a_budget(
    make: Callable[[], Program], plain: Run, plain_s: float, activation_bytes: int, ratio: float
) -> Row:
    run = Run(make)
    budget_bytes = run.budget_bytes(activation_bytes, ratio)
    region = tightfit.online(budget_bytes, most_again=MOST_AGAIN, core="C++")
    row: Row = {"activation_bytes": activation_bytes, "status": "ok", "why": ""}
    seconds = 0.0
    try:
        with region:
            seconds = run.train()
    except (BudgetExceeded, InfeasibleBudget) as error:
        row |= {"status": type(error).__name__, "why": str(error).split(" more")[0][:160]}
    report = region.report()
    compute_s = report.compute_s or 1.0
    return row | {
        "core": report.core,
        "bitwise": run.results == plain.results if row["status"] == "ok" else None,
        "within": report.peak_bytes <= budget_bytes,
        "operators": report.operators,
        "evictions": report.evictions,
        "again": report.rematerialisations,
        "kernels": round(1 + report.again_s / compute_s, 3),
        "time": round(seconds / plain_s, 2),
        "shares": {
            "compute": round(report.compute_s, 4),
            "again": round(report.again_s, 4),
            "scoring": round(report.scoring_s, 4),
            "searching": round(report.searching_s, 4),
            "rest": round(report.rest_s, 4),
        },
    }


def overheads() -> Iterator[Row]:
    """Yield what an operator costs more where memory is ample: chains on 16 floats."""

    def chain() -> torch.Tensor:
        y = torch.ones(16, requires_grad=True)
        for _ in range(1000):
            y = y * 1.0001
        return y.sum()

    def forward() -> None:
        with torch.no_grad():
            chain()

    ways: dict[str, tuple[Callable[[], Any], int]] = {
        "inference": (forward, 1002),
        "training": (lambda: chain().backward(), 2004),
    }
    for core, (name, (work, operators)) in itertools.product(CORES, ways.items()):
        plain, online = [], []
        for _ in range(15):
            plain.append(_seconds(work))
            with tightfit.online("1TiB", core=core):
                work()
                online.append(_seconds(work))
        extra_us = (min(online) - min(plain)) / operators * 1e6
        plain_us = min(plain) / operators * 1e6
        yield {
            "kind": "overhead",
            "core": core,
            "way": name,
            "plain_us": round(plain_us, 2),
            "extra_us": round(extra_us, 1),
        }


def _seconds(work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


LARGEST: dict[str, tuple[Callable[[int], Program], int, str]] = {
    "ResNet": (lambda n: resnet(blocks=n), 16 << 20, "residual blocks per stage"),
    "LSTM": (lambda n: lstm(length=4 * n), 6 << 20, "steps of the sequence / 4"),
    "TreeLSTM": (lambda n: treelstm(leaves=4 * n), 6 << 20, "leaves / 4"),
    "MLP": (lambda n: mlp(depth=n, width=64), 4 << 20, "layers"),
}


def largest() -> Iterator[Row]:
    """Yield the largest input of each program that trains in a fixed budget, with and without."""
    for name, (make, budget_bytes, what) in LARGEST.items():

        def fits_plain(size: int, make=make, budget_bytes=budget_bytes) -> bool:
            run = Run(lambda: make(size))
            own_bytes = 2 * sum(p.nbytes for p in run.model.parameters())
            return run.activation_bytes() + own_bytes <= budget_bytes

        def fits_online(size: int, make=make, budget_bytes=budget_bytes) -> bool:
            gc.collect()
            before_bytes = sum(map(allocated_bytes, storages_alive()))
            run = Run(lambda: make(size))
            try:
                with tightfit.online(
                    before_bytes + budget_bytes, most_again=MOST_AGAIN, core="C++"
                ):
                    for step in range(2):
                        run.loss_of(step).backward()
                        run.optimizer.step()
                        run.optimizer.zero_grad()
            except (BudgetExceeded, InfeasibleBudget):
                return False
            return True

        yield {
            "kind": "largest",
            "program": name,
            "what": what,
            "budget_bytes": budget_bytes,
            "plain": _largest(fits_plain),
            "online": _largest(fits_online),
        }


def _largest(fits: Callable[[int], bool], most: int = 128) -> int:
    """Return the largest size that fits, by doubling and halving."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


KINDS: dict[str, Callable[[], Iterator[Row]]] = {
    "slowdown": slowdowns,
    "overhead": overheads,
    "largest": largest,
}

INTRODUCTION = """# Any program in a budget

```python
with tightfit.online(budget="8GiB") as region:
    for x, y in batches:
        loss_fn(model(x), y).backward()
        optimizer.step(), optimizer.zero_grad()
print(region.report())
```

Operators are recorded while they run, below autograd and on plain tensors. Where a request
would exceed the budget, the allocator asks for room. The tensors that are cheapest to compute
again and longest unused lose their memory. They get it back when an operator reads them (Dynamic
Tensor Rematerialization, Kirisame et al., 2021). There is no plan and no graph, so loops,
branches on data, recursion, gradients of gradients and sizes that differ from step to step are
all the same to it. Losses, gradients, buffers and the random state have the bits of plain
PyTorch. On the CPU, and on a GPU in a way of its own; a model that `tightfit.fit` can plan takes
less time with a plan.

**The budget is a limit.** It counts all that PyTorch's CPU allocator gives out, workspace of
operators included, and tensors that exist when the region begins. If an operator cannot fit,
`BudgetExceeded` names it, the bytes it needs and those held; parameters and optimizer state are as
before, and a smaller step may follow. If computing again costs more than `most_again` times the
step itself, `InfeasibleBudget` ends the thrashing.

**On a GPU**: `tightfit.online(budget="8GiB", device="cuda")`. The limit is PyTorch's own
(`set_per_process_memory_fraction`), for bytes that its allocator reserves there. Nothing is called
before it refuses, so an operator that is refused memory runs again after as much was freed, with
the random generator put back. An operator that reads a tensor it overwrites, as `add_` does, must
not, for it may have begun to write. Room is made before it runs: as much as it took the last time,
or, the first time, as its arguments take. If it is refused all the same, `BudgetExceeded` says that
overwritten tensors may have changed. The core is that in Python: the core in C++ is for the CPU.
Memory on the CPU does not count. A request outside PyTorch's operators evicts nothing: call
`region.evict` before. All operators run on one stream. Kernels that add atomically, or that cuDNN
picks by the workspace it gets, may give other last bits when they run again, unless
`torch.use_deterministic_algorithms(True)` holds. cuDNN's recurrent kernels with dropout never run
again. Peak statistics restart where the region begins. It has not run on a GPU yet: the battery of
tests runs on the CPU with an allocator that refuses, and with `torch.cuda` played by the CPU.

**Never evicted** are parameters, inputs and other tensors from before, gradients once
accumulated, the optimizer's state. Nor are sparse tensors, storages below `smallest`, a tensor
whose address was handed out (`numpy()`, `data_ptr()`), and one made by `torch.empty` that no
operator was seen writing as a whole. Printing, saving, copying or reading an evicted tensor
brings it back; whoever goes around PyTorch's Python interface gets PyTorch's error, not wrong
data.

**The core** that sees operators is C++, on a dispatch key below autograd. It is compiled once for
each release of PyTorch, in half a minute, with the compiler and PyTorch's headers that are there,
and kept in tightfit's cache. No step waits for that. The first region has it compiled by another
process, of the lowest priority, which goes on if the program ends first. Until then Python sees
operators by a dispatch mode, with the same results at a higher cost for each operator. Regions
that begin afterwards take the core in C++. A region keeps the core it began with: a long training
in one region begins with `core="C++"`, which waits and says so. Without a compiler, or if it
refuses, regions stay with Python, and one warning says why; `report().core` says which core it was,
`core="Python"` asks for the core in Python.

**Without an optimizer** nothing tells a step's end: `region.keep(state)` keeps tensors that are
carried on, and frees the batches they came from.

**Limits**: one region at a time in a process. Tensors that other threads of the program compute
count, but are not seen, so they are never evicted. Operators of other devices run, but nothing
there is evicted. An extension that keeps a raw address across an allocation of its own is not
seen (register it as an operator, or call `region.evict` before). The policy is one of `tightfit
simulate` ([policies.md](policies.md)); two protections are added that a runtime needs: tensors used
by the last eight operators and gradients under way go last. Candidates are a sample, 64 or the
square root of their number, kept in a heap: a score only rises while neighbours are evicted.

Rows: `python benchmarks/online.py`, this page is written by it. Processor time of one thread;
these programs are small, so the cost of keeping the record weighs more than it does in use.
"""

TRIED = """## Tried and taken out: plans for steps that repeat

A step of a region can be recorded while it runs, and made a graph. The core in Python could
have a plan searched in the background (`plan_seconds=10`) and follow it. The same operators had
to run on the same sizes from one optimizer step to the next. A step that turned out differently
went on by eviction.

It was measured on larger steps than those above: six programs, plain steps of 48 to 214 ms, at
ratios of 0.5 and 0.4. All 36 runs had the bits of plain PyTorch and kept to the budget. The least
processor time of a step at the two ratios, as a multiple of plain PyTorch's:

| program | eviction, C++ | eviction, Python | a plan, Python |
| --- | --- | --- | --- |
| lstm | 1.26, 1.37 | 2.16, 2.55 | 2.38, 2.16 |
| transformer | 1.23, 1.40 | 1.55, 1.56 | 1.42, 1.60 |
| resnet | 1.30, 1.44 | 1.59, 1.74 | 1.55, 1.80 |
| gan | 1.27, 1.27 | 1.72, 1.71 | 1.66, 1.52 |
| mlp | 1.21, 1.48 | 1.32, 1.69 | 1.33, 1.64 |
| ttt | 1.45, 1.95 | 2.32, 2.95 | 2.02, 2.04 |

In 10 of the 12 cells a plan computed less again than eviction by the same core, and in 8 the step
took less time. In none did it take less time than eviction by the core in C++: seeing each operator
in Python cost more than a plan saved, so plans were taken out. Where a step has a graph,
`tightfit.fit` plans it without that cost.
"""


def document(rows: list[Row]) -> str:
    """Return the page."""
    return "\n\n".join(
        [
            INTRODUCTION.rstrip(),
            *_slowdown_part(rows),
            *_overhead_part(rows),
            *_largest_part(rows),
            TRIED.rstrip(),
        ]
    )


def _slowdown_part(rows: list[Row]) -> list[str]:
    found = [row for row in rows if row["kind"] == "slowdown"]
    if not any(row["status"] == "ok" for row in found):
        return []
    names = list(dict.fromkeys(row["program"] for row in found))
    cells = {(row["program"], row["ratio"]): row for row in found}
    lines = []
    for name in names:
        size = format_bytes(next(r for r in found if r["program"] == name)["activation_bytes"])
        texts = [_cell(cells[name, r]) if (name, r) in cells else "" for r in RATIOS]
        lines.append((f"{name} ({size})", *texts))
    ok = [row for row in found if row["status"] == "ok"]
    spent = {part: sum(row["shares"][part] for row in ok) for part in ok[0]["shares"]}
    total = sum(spent.values()) or 1.0
    shares = ", ".join(f"{part} {100 * s / total:.1f} %" for part, s in spent.items())
    return [
        "## Slowdown by ratio",
        "A ratio is a share of the activation peak of plain PyTorch, fresh gradients included. "
        "Seconds in kernels as a multiple of those of the first runs, and in brackets operators "
        "that ran again per operator of the program. `over`: an operator was named that cannot "
        "fit. `thr`: recomputation has cost four times the step itself. An "
        "empty cell or a program that is missing: not measured; the least of "
        f"{MEASURED_AGAIN} runs. "
        f"{len(ok)} of {len(found)} cells trained, {sum(r['bitwise'] for r in ok)} of them with "
        f"the same bits in losses, gradients, buffers and random state over {STEPS} steps; "
        f"{sum(r['within'] for r in found)} of {len(found)} never exceeded the budget.",
        table(("program (activations)", *map(str, RATIOS)), lines),
        f"Where the time inside went, over all cells that trained: {shares} (the paper's "
        f"Figure 4). Core: {', '.join(sorted({row['core'] for row in found}))}.",
    ]


def _cell(row: Row) -> str:
    if row["status"] == "ok":
        return f"{row['kernels']:.2f} ({row['again'] / row['operators']:.2f})"
    return "thr" if row["status"] == "InfeasibleBudget" else "over"


def _overhead_part(rows: list[Row]) -> list[str]:
    found = [row for row in rows if row["kind"] == "overhead"]
    if not found:
        return []
    lines = [(r["core"], r["way"], f"{r['plain_us']:.1f}", f"{r['extra_us']:.1f}") for r in found]
    return [
        "## What an operator costs more",
        "Where memory is ample: chains of 1000 multiplications of 16 floats, least of 15 runs.",
        table(("core", "way", "plain PyTorch, us per operator", "more inside a region, us"), lines),
    ]


def _largest_part(rows: list[Row]) -> list[str]:
    found = [row for row in rows if row["kind"] == "largest"]
    if not found:
        return []
    lines = [
        (
            r["program"],
            r["what"],
            format_bytes(r["budget_bytes"]),
            str(r["plain"]),
            str(r["online"]),
        )
        for r in found
    ]
    return [
        "## The largest input in a fixed budget",
        "As the paper's Table 1, at CPU sizes: the largest that trains (parameters, gradients and "
        "momentum count), recomputing at most four times as much, found to a sixteenth. Sizes "
        "above 256 are not tried.",
        table(("program", "size counts", "budget", "plain PyTorch", "in a region"), lines),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS], default=[])
    kinds = parser.parse_args().kinds or [*KINDS]
    torch.set_num_threads(1)
    rows = read_rows(RESULTS)
    for kind in kinds:
        rows = [row for row in rows if row["kind"] != kind]
        for row in KINDS[kind]():
            rows.append(row)
            print(json.dumps(row), flush=True)
            write_rows(RESULTS, rows)
            write_atomically(PAGE, (document(rows) + "\n").encode())


if __name__ == "__main__":
    main()
