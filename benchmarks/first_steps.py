"""How long the first steps within a budget take, cold and warm, and what a later step costs.

    python benchmarks/first_steps.py                  # all models: some minutes on two cores
    python benchmarks/first_steps.py resnet50 cells_60
    python benchmarks/first_steps.py --table          # writes docs/first-steps.md from the rows

Each model trains in a process of its own: plainly, then within `RATIO` of what the plain steps
held. *Cold* is a process with an empty cache, *warm* the next one with the same cache. Seconds are
those of a clock, from the begin of a step to its end; processor seconds, which another program on
the machine disturbs less, are next to them. Once no better plan is searched any more, plain and
fitted steps are taken in turns, and the median of their ratios is the cost of a later step. Rows
are appended to ``benchmarks/results/first_steps.jsonl``.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tightfit
from benchmarks.rows import append_rows, read_rows
from benchmarks.training import circumstances, let_search_end
from benchmarks.training_loops.recurrences import Unrolled
from tightfit.allocator import measure_peak
from tightfit.errors import InfeasibleBudget
from tightfit.zoo import make

__all__ = ["MODELS", "RATIO", "document", "row_of"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "first_steps.jsonl"
TABLE = ROOT / "docs" / "first-steps.md"
RATIO = 0.6
_ROUNDS = 15


@dataclass(frozen=True)
class Work:
    """A model, its inputs, and the loss of what it returns."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[[Any], Tensor] = lambda output: output


def _convolutions() -> Work:
    """Eight convolutions with BatchNorm, 64 images of 32 x 32."""
    widths = (3, *[32] * 4, *[64] * 4)
    layers = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        for a, b in itertools.pairwise(widths)
    ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    target = torch.randint(10, (64,))
    return Work(model, (torch.randn(64, 3, 32, 32),), lambda y: F.cross_entropy(y, target))


def _perceptron() -> Work:
    """Six layers of width 128, batch 32: a step of about a millisecond."""
    layers = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6)]
    return Work(nn.Sequential(*layers), (torch.randn(32, 128),), lambda y: y.square().mean())


def _encoder() -> Work:
    """Four encoder layers of PyTorch, width 128, 16 texts of 64 words."""
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return Work(model, (torch.randn(16, 64, 128),), lambda y: y.square().mean())


def _zoo(name: str, **settings: Any) -> Callable[[], Work]:
    def made() -> Work:
        example = make(name, **settings)
        assert isinstance(example.args, tuple)
        if example.loss is None:
            return Work(example.model, example.args)
        return Work(example.model, example.args, lambda y: example.loss(y, example.target))

    return made


def _cells(pairs: int) -> Callable[[], Work]:
    def made() -> Work:
        waves = torch.sin(torch.arange(pairs + 1) / 5.0 + torch.randn(64, 1))
        model = Unrolled(51)
        return Work(model, (waves[:, :-1],), lambda y: F.mse_loss(y, waves[:, 1:]))

    return made


MODELS: dict[str, tuple[str, Callable[[], Work]]] = {
    "perceptron": (_perceptron.__doc__ or "", _perceptron),
    "convolutions": (_convolutions.__doc__ or "", _convolutions),
    "encoder": (_encoder.__doc__ or "", _encoder),
    "resnet50": ("ResNet-50, 16 images of 128 x 128.", _zoo("resnet50", batch=16, size=128)),
    "gpt2": ("GPT-2 small, 4 texts of 256 words.", _zoo("gpt2", batch=4, sequence=256)),
    **{f"cells_{n}": (f"{n} unrolled pairs of LSTM cells.", _cells(n)) for n in (10, 20, 40, 60)},
}


def main(words: Sequence[str] | None = None) -> None:
    """Measure the models asked for; append the row of each as soon as it is there."""
    options = _arguments(words)
    if options.table:
        rows = read_rows(RESULTS)
        TABLE.write_text(document(rows))
        return
    if options.one:
        print(json.dumps(row_of(MODELS[options.one][1](), rounds=options.rounds)))
        return
    for name in options.models or MODELS:
        row = _row(name, options)
        append_rows(options.output, row)
        print(_line(row), end="", flush=True)


def _row(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a model."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for process, rounds in (("cold", 0), ("warm", options.rounds)):
            around = {"OMP_NUM_THREADS": str(options.threads), "TIGHTFIT_CACHE_DIR": folder}
            found[process] = _in_a_process(name, around, rounds)
    around = circumstances(options.threads, rounds=options.rounds)
    return {**around, "model": name, "front": _FRONT, **found}


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="of later steps, in turns")
    parser.add_argument("--threads", type=int, default=2, help="that kernels run on")
    parser.add_argument("--table", action="store_true", help="write the page, measure nothing")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def _in_a_process(name: str, around: Mapping[str, str], rounds: int) -> dict[str, Any]:
    environment = {**os.environ, **around}
    command = [sys.executable, __file__, f"--one={name}", f"--rounds={rounds}"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def row_of(work: Work, rounds: int) -> dict[str, Any]:
    """Train plainly, then within a budget; return the seconds of the steps and what was held."""
    plain, inputs = work.model, work.inputs
    fitted = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (plain, fitted)]

    def step(model: nn.Module, optimizer: Any) -> None:
        work.loss(model(*inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def plainly() -> None:
        step(plain, optimizers[0])

    def within() -> None:
        step(fitted, optimizers[1])

    plain_s = [_seconds(plainly) for _ in range(6)]
    held = [*fitted.parameters(), *fitted.buffers(), *inputs]
    _, peak = measure_peak(plainly, device=torch.device("cpu"))
    budget_bytes = int(RATIO * (peak.peak_bytes + sum(t.nbytes for t in held)))
    tightfit.fit(fitted, budget_bytes, optimizer=optimizers[1], on_exceed="warn")
    try:
        fitted_s = [_seconds(within) for _ in range(6)]
    except InfeasibleBudget as error:
        assert error.minimum_bytes is not None
        budget_bytes = error.minimum_bytes
        tightfit.fit(fitted, budget_bytes, optimizer=optimizers[1], on_exceed="warn")
        fitted_s = [_seconds(within) for _ in range(6)]
    row = {"budget_bytes": budget_bytes, "plain_s": plain_s, "fitted_s": fitted_s}
    if rounds:
        row |= _in_turns(plainly, within, rounds)
    return {**row, "overhead": tightfit.report(fitted).overhead}


def _in_turns(
    plainly: Callable[[], None], within: Callable[[], None], rounds: int
) -> dict[str, Any]:
    """Wait until no better plan is searched; then compare steps taken in turns."""
    let_search_end()
    with warnings.catch_warnings():  # a plain step between two fitted ones counts for the first
        warnings.simplefilter("ignore")
        for _ in range(3):
            within()
        ratios = [_seconds(within)[1] / _seconds(plainly)[1] for _ in range(rounds)]
    return {"later": statistics.median(ratios)}


def _seconds(action: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of a clock and of this thread's processor that something takes."""
    clock, processor = time.perf_counter(), time.thread_time()
    action()
    return time.perf_counter() - clock, time.thread_time() - processor


_HEAD = """# The first steps within a budget

Written by `python benchmarks/first_steps.py --table` from the rows of
`benchmarks/first_steps.py`; do not edit. Each model trains within {ratio} of the peak of its plain
steps (the least budget where that is refused), in a process of its own: *cold* with an empty cache,
*warm* with results kept by the process before. A step is forward, backward and optimizer. Seconds
are those of a clock, in brackets those of the processor in the training thread, both of the fitted
model. A *later* step is the median ratio to a plain one, in turns, when no better plan is searched
any more. *Overhead* is recomputation by the plan.

| model | plain | cold: step 1 | steps 2-6 | warm: step 1 | steps 2-6 | later | overhead |
|---|--:|--:|--:|--:|--:|--:|--:|
"""


def document(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page; of several rows of a model the last counts."""
    newest = {row["model"]: row for row in rows if row.get("front") == _FRONT}
    measured = [newest[model] for model in MODELS if model in newest]
    machines = {
        f"{row['device']}, threads: {row['threads']}, PyTorch {row['torch']}" for row in measured
    }
    loads = [row["load"] for row in measured]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in measured))
    end = (
        f"\nMeasured on {'; '.join(sorted(machines))}, load of the machine {min(loads)} to "
        f"{max(loads)}, commit {commits}.\n"
    )
    return _HEAD.format(ratio=RATIO) + "".join(map(_line, measured)) + end


_FRONT = "dynamo"  # follows the Python of a model; rows of the tracer before it have another


def _line(row: dict[str, Any]) -> str:
    cold, warm = row["cold"], row["warm"]
    plain = statistics.median(clock for clock, _ in warm["plain_s"][1:])
    cells = [MODELS[row["model"]][0].rstrip("."), f"{plain:.3f} s"]
    for process in (cold, warm):
        first, *others = process["fitted_s"]
        cells += [_text(first), _text([sum(each) for each in zip(*others, strict=True)])]
    cells += [f"{warm['later']:.2f}x", f"{warm['overhead']:+.1%}"]
    return f"| {' | '.join(cells)} |\n"


def _text(seconds: Sequence[float]) -> str:
    clock, processor = seconds
    return f"{clock:.1f} ({processor:.1f}) s"


if __name__ == "__main__":
    main()
