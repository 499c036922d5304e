"""What an arena does to the memory and the time of training steps.

    python benchmarks/arena.py

Time: two processes, one with the arena, take turns step by step; a pair's ratio is of processor
time. Memory: each way of training runs in a process of its own; what is resident is
compared with what was before the model was made, everything imported and a small model fitted.
Rows go to ``benchmarks/results/arena.jsonl``; ``--table`` only writes ``docs/arena-measured.md``.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

import tightfit
from benchmarks.documents import table
from benchmarks.processes import in_turns
from benchmarks.rows import BenchmarkPage, Row
from tightfit.allocator import anonymous_bytes, resident_bytes
from tightfit.studies.model import ModelSettings, load_example
from tightfit.units import parse_bytes

__all__ = ["BENCHMARK_PAGE", "HELD", "document", "fit_something_small", "highest", "made"]

HERE = Path(__file__).resolve().parent
ROWS = HERE / "results" / "arena.jsonl"
PAGE = HERE.parent / "docs" / "arena-measured.md"

TIMED: dict[str, dict[str, Any]] = {
    "unet": {"batch": 1},
    "mobilenet_v2": {"batch": 4, "size": 128},
    "googlenet": {"batch": 4, "size": 128},
    "resnet50": {"batch": 4, "size": 128},
    "gpt2": {"batch": 1, "sequence": 128},
}
HELD: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("resnet50", {"batch": 16, "size": 128}, "344MiB"),
    ("mobilenet_v2", {"batch": 16, "size": 128}, "213MiB"),
    ("unet", {"batch": 4}, "232MiB"),
    ("gpt2", {"batch": 4, "sequence": 256}, "1030MiB"),
)
PAIRS, WARM_UP = 15, 5
MIB = 1 << 20


def measure() -> None:
    """Append all rows."""
    for name, settings in TIMED.items():
        BENCHMARK_PAGE.append(timed(name, settings))
    for name, settings, budget in HELD:
        for way in ("fit", "fit, arena"):
            BENCHMARK_PAGE.append(in_its_process(name, settings, budget, way))


def child(name: str, settings: str, budget: str, way: str) -> None:
    """Say what a fitted model holds in this process."""
    print(json.dumps(held(name, json.loads(settings), budget, way)))


def made(name: str, settings: dict[str, Any]) -> tuple[nn.Module, Any, Callable[[], None]]:
    """Return a model, its optimizer and a function that takes a training step."""
    torch.manual_seed(0)
    model, loss, args, target = load_example(f"zoo:{name}", ModelSettings(**settings))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        output = model(*args) if isinstance(args, tuple) else model(**args)
        value = loss(output, target) if loss is not None else getattr(output, "loss", output)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def timed(name: str, settings: dict[str, Any]) -> Row:
    """Let steps in the arena and plain ones take turns, each in a process of its own."""
    arena, plain = in_turns(
        [lambda: steps_in_an_arena(name, settings), lambda: plain_steps(name, settings)],
        WARM_UP + PAIRS,
    )
    arena, plain = arena[WARM_UP:], plain[WARM_UP:]
    pairs = [ours["seconds"] / theirs["seconds"] for ours, theirs in zip(arena, plain, strict=True)]
    low, high = _interval(pairs)
    return {
        "kind": "time",
        "model": name,
        "settings": settings,
        "pairs": len(pairs),
        "ratio": statistics.median(pairs),
        "low": low,
        "high": high,
        "step_s": statistics.median(step["seconds"] for step in plain),
        "faults": statistics.median(step["faults"] for step in arena),
        "faults_without": statistics.median(step["faults"] for step in plain),
        "height_bytes": arena[-1]["height_bytes"],
        "load_bytes": arena[-1]["load_bytes"],
        "fallbacks": arena[-1]["fallbacks"],
    }


def plain_steps(name: str, settings: dict[str, Any]) -> Callable[[], Row]:
    """Return what takes a plain step and says what it took."""
    _, _, step = made(name, settings)

    def take() -> Row:
        faults, started = _faults(), time.process_time()
        step()
        return {"seconds": time.process_time() - started, "faults": _faults() - faults}

    return take


def steps_in_an_arena(name: str, settings: dict[str, Any]) -> Callable[[], Row]:
    """Return what takes a step in an arena, the border between two steps included."""
    _, _, step = made(name, settings)
    arena = tightfit.arena().__enter__()

    def take() -> Row:
        faults, started = _faults(), time.process_time()
        step()
        arena.step()
        spent, report = time.process_time() - started, arena.report
        return {
            "seconds": spent,
            "faults": _faults() - faults,
            "height_bytes": report.height_bytes,
            "load_bytes": report.lower_bound_bytes,
            "fallbacks": report.fallbacks,
        }

    return take


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Return order statistics that hold the median with about 95 %: of 15 the 4th and the 12th."""
    ordered = sorted(values)
    cut = max(0, int(len(ordered) / 2 - 0.98 * len(ordered) ** 0.5))
    return ordered[cut], ordered[-1 - cut]


def in_its_process(name: str, settings: dict[str, Any], budget: str, way: str) -> Row:
    """Measure what a fitted model holds, in a fresh process."""
    command = [sys.executable, __file__, "--child", name, json.dumps(settings), budget, way]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def held(name: str, settings: dict[str, Any], budget: str, way: str) -> Row:
    """Train eight steps within a budget; the most that is resident from `fit` on, step by step."""
    fit_something_small()
    before, anonymous_before = resident_bytes(), anonymous_bytes()
    model, optimizer, step = made(name, settings)
    most: list[int] = []
    anonymous: list[int] = []
    spent: list[float] = []
    with highest() as take, highest(anonymous_bytes) as take_anonymous:
        tightfit.fit(model, budget, optimizer=optimizer, arena=way.endswith("arena"))
        for _ in range(8):
            started = time.process_time()
            step()
            spent.append(time.process_time() - started)
            most.append(take() - before)
            anonymous.append(take_anonymous() - anonymous_before)
    parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return {
        "kind": "memory",
        "model": name,
        "settings": settings,
        "budget": budget,
        "way": way,
        "share": max(most[3:]) / parse_bytes(budget),
        "anonymous_share": max(anonymous[3:]) / parse_bytes(budget),
        "first_share": max(most[:3]) / parse_bytes(budget),
        "overhead": tightfit.report(model).overhead,
        "step_s": statistics.median(spent[5:]),
        "parameters": hashlib.sha1(parameters).hexdigest(),
    }


def fit_something_small() -> None:
    """Let everything be imported and used once."""
    small = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4))
    tightfit.fit(small, "64MiB")
    small(torch.randn(2, 3, 8, 8)).sum().backward()
    tightfit.unfit(small)
    gc.collect()


@contextlib.contextmanager
def highest(measured: Callable[[], int] = resident_bytes) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the most that was measured since it was called last."""
    most = [0]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            most[0] = max(most[0], measured())

    def take() -> int:
        found, most[0] = max(most[0], measured()), 0
        return found

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield take
    finally:
        ended.set()
        thread.join()


def document(rows: Sequence[Row]) -> str:
    """The page as Markdown."""
    parts = [
        "# What an arena does to training steps",
        "Generated by `python benchmarks/arena.py` from rows in `benchmarks/results/`; do not "
        "edit. One thread of a machine that other work shared; plain SGD.",
        "## Time\n\nPlain PyTorch, nothing planned but addresses. Ratio: processor time of a step "
        "in the arena / without it. It is the median of pairs of steps of two processes that took "
        "turns, with an interval of about 95 %. Faults: pages that the system had to give "
        "in a step. Fallbacks: requests that the ordinary allocator served instead of as planned.",
        _times([row for row in rows if row["kind"] == "time"]),
        "## Memory\n\nResident memory above the libraries / budget: the most from `fit` until step "
        "3, and the most over steps 4 to 8. In the first, the step is captured, its operators are "
        "measured, and it is planned. No files: the same without pages of files; where that is "
        "more, an arena has given back code of libraries that was run before. Overhead: the "
        "plan's, of computing; the price of an arena is its increase there, as plans leave room "
        "for other memory of the process. Step: processor time, the median of steps 6 "
        "to 8. Some of these are only recorded, where better plans were still found. The rows were "
        "taken one after the other under a load that changed from 3 to 14 on two cores. So "
        "compare times by the ratios above. The same parameters, bit for bit, in both "
        "ways.",
        _memory([row for row in rows if row["kind"] == "memory"]),
    ]
    return "\n\n".join(parts) + "\n"


def _times(rows: Sequence[Row]) -> str:
    header = ["model", "settings", "step (s)", "ratio", "interval", "faults", "without"]
    lines = [
        [
            row["model"],
            _settings(row["settings"]),
            f"{row['step_s']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['low']:.3f} to {row['high']:.3f}",
            f"{row['faults']:.0f}",
            f"{row['faults_without']:.0f}",
            f"{row['height_bytes'] / MIB:.1f} / {row['load_bytes'] / MIB:.1f}",
            str(row["fallbacks"]),
        ]
        for row in rows
    ]
    return table([*header, "height / load (MiB)", "fallbacks"], lines)


def _memory(rows: Sequence[Row]) -> str:
    header = ["model", "settings", "budget", "way", "until step 3", "steps 4 to 8", "no files"]
    lines = [
        [
            row["model"],
            _settings(row["settings"]),
            row["budget"],
            row["way"],
            f"{row['first_share']:.3f}",
            f"{row['share']:.3f}",
            f"{row['anonymous_share']:.3f}" if "anonymous_share" in row else "",
            f"{100 * row['overhead']:.1f} %",
            f"{row['step_s']:.2f}",
            row["parameters"][:8],
        ]
        for row in rows
    ]
    return table([*header, "overhead", "step (s)", "parameters"], lines)


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())


BENCHMARK_PAGE = BenchmarkPage(ROWS, PAGE, document)

if __name__ == "__main__":
    torch.set_num_threads(1)
    BENCHMARK_PAGE.main(__doc__, measure, child)
