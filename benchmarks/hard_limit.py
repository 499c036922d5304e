"""Training under a hard limit on what the process holds, and two hundred steps without a leak.

    python benchmarks/hard_limit.py

Each training runs in a process of its own. Another one looks at its resident memory every 2 ms,
from before the first step on, and kills it once it exceeds what the libraries held before the
model was made and 1.15 of the budget: a control group of the system does no more. Rows go to
``benchmarks/results/hard_limit.jsonl``; ``--table`` only writes ``docs/hard-limit.md``.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import tightfit
from benchmarks.arena import HELD, fit_something_small, made
from benchmarks.documents import table
from benchmarks.rows import BenchmarkPage, Row
from tightfit.allocator import CpuMeter, resident_bytes
from tightfit.units import parse_bytes

__all__ = ["BENCHMARK_PAGE", "document"]

HERE = Path(__file__).resolve().parent
ROWS = HERE / "results" / "hard_limit.jsonl"
PAGE = HERE.parent / "docs" / "hard-limit.md"

LIMITED: tuple[tuple[str, dict[str, Any], str, str], ...] = tuple(
    (name, settings, budget, way)
    for name, settings, budget in HELD
    for way in ("plain", "fit", "fit, arena")
)
STEPS = 10
SHARE = 1.15
LONG = ("mobilenet_v2", {"batch": 2, "size": 96}, "arena")
LONG_STEPS = 200
MIB = 1 << 20


def measure() -> None:
    """Append all rows."""
    BENCHMARK_PAGE.append(long_run(*LONG))
    for name, settings, budget, way in LIMITED:
        BENCHMARK_PAGE.append(limited(name, settings, budget, way))


def train(name: str, settings: str, budget: str, way: str) -> None:
    """Train, and say what the libraries hold and which step comes."""
    fit_something_small()
    print(resident_bytes(), flush=True)
    model, optimizer, step = made(name, json.loads(settings))
    if way != "plain":
        tightfit.fit(model, budget, optimizer=optimizer, arena=way.endswith("arena"))
    for number in range(STEPS):
        print(number, flush=True)
        step()
    print(STEPS, flush=True)


def limited(name: str, settings: dict[str, Any], budget: str, way: str) -> Row:
    """Train under the limit, from before the first step on; say how far it came."""
    command = [sys.executable, __file__, "--child", name, json.dumps(settings), budget, way]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        libraries = int(process.stdout.readline())
        watch = _Watch(process.pid, libraries, libraries + int(SHARE * parse_bytes(budget)))
        step = -1
        for line in process.stdout:
            if not line.strip().isdigit():
                continue
            if step < 0:
                watch.start()
            step = int(line)
        watch.end()
    return {
        "kind": "limit",
        "model": name,
        "settings": settings,
        "budget": budget,
        "way": way,
        "steps": step,
        "was_killed": process.returncode == -signal.SIGKILL,
        "most_share": watch.most / parse_bytes(budget),
    }


class _Watch(threading.Thread):
    """Kills a process that holds more than a limit; remembers the most above the libraries."""

    def __init__(self, pid: int, libraries: int, limit: int) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self._pid, self._libraries, self._limit = pid, libraries, limit
        self._ended = threading.Event()

    def run(self) -> None:
        pages = Path(f"/proc/{self._pid}/statm")
        while not self._ended.wait(0.002):
            try:
                held = int(pages.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
            except (OSError, IndexError):
                return
            self.most = max(self.most, held - self._libraries)
            if held > self._limit:
                os.kill(self._pid, signal.SIGKILL)
                return

    def end(self) -> None:
        """Stop looking."""
        self._ended.set()
        if self.is_alive():
            self.join()


def long_run(name: str, settings: dict[str, Any], way: str) -> Row:
    """Take two hundred steps in an arena; compare what is held after 20 and at the end."""
    _, _, step = made(name, settings)
    meter = CpuMeter()
    held: list[tuple[int, int]] = []
    with tightfit.arena() as arena:
        for number in range(LONG_STEPS):
            step()
            arena.step()
            if number in (19, LONG_STEPS - 1):
                gc.collect()
                held.append((meter.live_bytes(), resident_bytes()))
        report = arena.report
    (live, resident), (live_then, resident_then) = held
    return {
        "kind": "long",
        "model": name,
        "settings": settings,
        "way": way,
        "steps": LONG_STEPS,
        "live_growth_bytes": live_then - live,
        "resident_growth_bytes": resident_then - resident,
        "exact_steps": report.exact_steps,
        "fallbacks": report.fallbacks,
    }


def document(rows: Sequence[Row]) -> str:
    """The page as Markdown."""
    limits = [row for row in rows if row["kind"] == "limit"]
    longs = [row for row in rows if row["kind"] == "long"]
    parts = [
        "# Under a hard limit",
        "Generated by `python benchmarks/hard_limit.py` from rows in `benchmarks/results/`; do "
        "not edit.",
        f"A watching process kills the training once it holds more than {SHARE} of the budget. "
        "Its base is the memory of the libraries before the model was made (everything imported, a "
        f"small model fitted). {STEPS} steps of plain SGD; capturing, measuring and planning in "
        "the first step count, too. Held: the most that was seen, as a share of the budget.",
        table(
            ["model", "budget", "way", "steps done", "held / budget"],
            [
                [
                    row["model"],
                    row["budget"],
                    row["way"],
                    f"killed in step {row['steps']}" if row["was_killed"] else "all",
                    f"{row['most_share']:.3f}",
                ]
                for row in limits
            ],
        ),
        f"## {LONG_STEPS} steps\n\nWhat is held after the last step more than after the 20th: by "
        "PyTorch's allocator, and by the process.",
        table(
            ["model", "way", "alive (B)", "resident (MiB)", "exact steps", "fallbacks"],
            [
                [
                    row["model"],
                    row["way"],
                    str(row["live_growth_bytes"]),
                    f"{row['resident_growth_bytes'] / MIB:.2f}",
                    str(row["exact_steps"]),
                    str(row["fallbacks"]),
                ]
                for row in longs
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


BENCHMARK_PAGE = BenchmarkPage(ROWS, PAGE, document)

if __name__ == "__main__":
    torch.set_num_threads(1)
    BENCHMARK_PAGE.main(__doc__, measure, train)
