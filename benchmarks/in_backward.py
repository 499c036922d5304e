"""The optimizer's step inside the plan, compared with a step after backward: bytes, seconds, bits.

python benchmarks/in_backward.py [--models gpt2,vit] [--optimizers "SGD;AdamW"] [--steps 20]
    [--ways plain,within]

Each run is a process of its own, one thread. ``plain`` is the loop as it is; ``after`` a fitted
model whose optimizer steps after backward; ``within`` one with ``update_in_backward=True``. Both
train in the least budget that holds for their loop, the latter with ample room, too, and with
gradients clipped by their norm in three budgets between. ``moved`` is ``within`` at its least
budget, with values moved to a file, too. The processes of one loop take turns, step by step: a time
is compared with that of the plain loop in the same round. Peaks are those of whole steps, from a
forward to ``zero_grad``, above what lasts between steps. Rows go to
``benchmarks/results/in_backward.jsonl``, the page is ``docs/in-backward-measured.md``.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import tightfit
from benchmarks.rows import Row, append_rows, read_rows
from benchmarks.training import circumstances, let_search_end
from benchmarks.whole_steps import llama
from tightfit.allocator import measure_peak
from tightfit.allocator.resident import resident_tensor_bytes
from tightfit.execution.attach import attached
from tightfit.zoo import Example, make

__all__ = ["MODELS", "OPTIMIZERS", "document"]

ROWS = Path(__file__).parent / "results" / "in_backward.jsonl"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "in-backward-measured.md"
MIB = 1 << 20
STEPS = 20
SECONDS = 30.0  # for a plan
BETWEEN = 0.2, 0.4, 0.6  # of the way from the least budget to an ample one

MODELS: dict[str, tuple[str, Callable[[], Example]]] = {
    "gpt2": ("GPT-2 small, 4 x 256", lambda: make("gpt2", batch=4, sequence=256, dropout=0.0)),
    "resnet50": ("ResNet-50, 16 x 128", lambda: make("resnet50", batch=16, size=128)),
    "llama": ("Llama's shape, 4 layers of 256, 8 x 256", llama),
    "vit": ("ViT", lambda: make("vit")),
    "unet": ("U-Net, 2 x 192", lambda: make("unet", batch=2, size=192)),
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=True),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
}
AMPLE = "64GiB"
STEP, END = "step\n", "end\n"  # lines that a process reads
NOT_TIMED = 2  # steps
CLIPPED = ", clipped"  # behind the name of an optimizer: gradients are clipped by their norm
MAX_NORM = 1.0
WAYS = "plain", "after", "within", "moved"
IN_BACKWARD = "within", "moved"  # ways whose optimizer steps there
FAR = "16GiB"

RUNS = (
    ("gpt2", "AdamW"),
    ("llama", "AdamW"),
    ("llama", "AdamW, foreach"),
    ("llama", "Adafactor"),
    ("resnet50", "SGD with momentum"),
    ("vit", "AdamW"),
    ("gpt2", "SGD with momentum"),
    ("unet", "SGD with momentum"),
    ("gpt2", "SGD"),
    ("llama", "AdamW, clipped"),
    ("gpt2", "AdamW, clipped"),
    ("resnet50", "SGD with momentum, clipped"),
    ("vit", "AdamW, clipped"),
)


class _Loop:
    """One model in its loop."""

    def __init__(self, model: str, optimizer: str) -> None:
        torch.manual_seed(0)
        self.example = MODELS[model][1]()
        self.model = self.example.model
        self.optimizer = OPTIMIZERS[optimizer.removesuffix(CLIPPED)](self.model.parameters())
        self.clips = optimizer.endswith(CLIPPED)
        self.is_clipped_after = self.clips
        self.losses: list[str] = []

    def fit(self, way: str, budget: int | str) -> None:
        """Fit the model, unless it is to be plain."""
        if way != "plain":
            within = way in IN_BACKWARD
            self.is_clipped_after = self.clips and not within
            tightfit.fit(
                self.model,
                budget,
                optimizer=self.optimizer,
                update_in_backward=within,
                clip_grad_norm=MAX_NORM if self.clips and within else None,
                limits=(SECONDS, 0.005),
                offload=FAR if way == "moved" else None,
            )

    def least_bytes(self, way: str) -> int:
        """Return the least budget in which the whole loop holds."""
        self.fit(way, AMPLE)
        args = self.example.args
        args, kwargs = ((), args) if isinstance(args, dict) else (args, {})
        fitted = attached(self.model)
        planned = fitted.smallest_budget(args, kwargs).found_bytes
        if way == "within":
            return planned
        account = fitted.account
        held = [*self.model.parameters(), *self.model.buffers(), *self.inputs()]
        stepping = resident_tensor_bytes(held, 1) + account.expected_bytes()
        return max(planned, stepping + account.optimizers.temporary_bytes())

    def inputs(self) -> list[torch.Tensor]:
        """Return the tensors of a batch."""
        args = self.example.args
        given = [*(args.values() if isinstance(args, dict) else args), self.example.target]
        return [x for x in given if isinstance(x, torch.Tensor)]

    def step(self) -> None:
        """Take one step."""
        args, loss_of = self.example.args, self.example.loss
        output = self.model(**args) if isinstance(args, dict) else self.model(*args)
        if loss_of is not None:
            loss = loss_of(output, self.example.target)
        else:
            loss = output if isinstance(output, torch.Tensor) else output["loss"]
        del output
        loss.backward()
        self.losses.append(loss.detach().numpy().tobytes().hex())
        del loss
        if self.is_clipped_after:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def hash(self) -> str:
        """Return what all weights, buffers, states and losses are, in short."""
        digest = hashlib.sha256(" ".join(self.losses).encode())
        for tensor in self.model.state_dict().values():
            digest.update(tensor.numpy().tobytes())
        for _, state in sorted(self.optimizer.state_dict()["state"].items()):
            for _, value in sorted(state.items()):
                digest.update(value.numpy().tobytes() if torch.is_tensor(value) else b"")
        return digest.hexdigest()[:16]


def child(model: str, optimizer: str, way: str, budget: str) -> None:
    """Find the least budget, or take a step for each line that is read; then print a row."""
    torch.set_num_threads(1)
    loop = _Loop(model, optimizer)
    if budget == "least":
        print(json.dumps({"least_bytes": loop.least_bytes(way)}))
        return
    loop.fit(way, budget if budget == AMPLE else int(budget))
    while sys.stdin.readline() == STEP:
        began, of_cpu = time.perf_counter(), time.process_time()
        loop.step()
        seconds = {"cpu_s": time.process_time() - of_cpu, "wall_s": time.perf_counter() - began}
        let_search_end()  # it would take time from the other processes
        print(json.dumps(seconds), flush=True)
    peak = measure_peak(loop.step, device="cpu")[1].peak_bytes
    row: Row = {"peak_bytes": peak, "hash": loop.hash()}
    if way != "plain":
        report = tightfit.report(loop.model)
        row |= {"planned_bytes": report.planned_peak_bytes, "constants": report.constant_bytes}
        row["overhead"] = report.overhead
    print(json.dumps(row))


class _Process:
    """One way to train one model, in a process of its own."""

    def __init__(self, *words: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", *words],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def answer(self, line: str) -> Row:
        """Return what the process answers to a line: a row, or its error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._error()
        answered = self._process.stdout.readline()
        return json.loads(answered) if answered else self._error()

    def _error(self) -> Row:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return {"error": lines[-1][:300] if lines else f"exit {self._process.returncode}"}


@functools.cache
def _least_bytes(model: str, optimizer: str, way: str) -> int | None:
    return _Process(model, optimizer, way, "least").answer(END).get("least_bytes")


def _budgets(model: str, optimizer: str, way: str) -> tuple[int | None, list[str]]:
    """Return the least budget of a way to train, and those in which it is measured."""
    if way == "plain":
        return None, [AMPLE]
    least = _least_bytes(model, optimizer, "within" if way == "moved" else way)
    budgets = [AMPLE] if way == "within" else []
    if least is None:
        return None, budgets
    budgets.append(str(int(1.005 * least) + MIB))
    if way == "within" and optimizer.endswith(CLIPPED):
        process = _Process(model, optimizer, way, AMPLE)
        process.answer(STEP)
        room = process.answer(END).get("planned_bytes", least) - least
        budgets += [str(int(least + part * room)) for part in BETWEEN]
    return least, budgets


def measure(models: Sequence[str], optimizers: Sequence[str], ways: str, steps: int) -> None:
    """Append the rows of some models with some optimizers."""
    for model, optimizer in RUNS:
        if model in models and optimizer in optimizers:
            wanted = [way for way in WAYS if way == "plain" or way in ways.split(",")]
            rows = _taking_turns(model, optimizer, wanted, steps)
            append_rows(ROWS, *rows)
            print(*rows, sep="\n", flush=True)


def _taking_turns(model: str, optimizer: str, ways: Sequence[str], steps: int) -> list[Row]:
    """Return the rows of one loop, of which all processes take turns."""
    rows: list[Row] = []
    for way in ways:
        least, budgets = _budgets(model, optimizer, way)
        head = {"model": model, "optimizer": optimizer, "way": way, "least_bytes": least}
        rows += [{**head, "budget": budget, "steps": steps} for budget in budgets]
    processes = [_Process(model, optimizer, row["way"], row["budget"]) for row in rows]
    answers = [[each.answer(STEP) for each in processes] for _ in range(steps - 1)]
    timed = answers[NOT_TIMED:]
    for index, process in enumerate(processes):
        rows[index] |= {**process.answer(END), **circumstances(1, len(timed))}
        for clock in ("cpu_s", "wall_s"):
            own = [(step[index].get(clock, math.nan), step[0][clock]) for step in timed]
            rows[index][clock] = statistics.median(seconds for seconds, _ in own)
            rows[index][f"{clock}_of_plain"] = statistics.median(a / b for a, b in own)
    return rows


def document(rows: Sequence[Row]) -> str:
    """Return the page."""
    lines = [
        "# The optimizer's step inside the plan, measured",
        "",
        "Generated by `python benchmarks/in_backward.py`; do not edit. One thread of a machine "
        "that other work shared. *Within*: `update_in_backward=True`; *after*: a fitted model "
        "whose optimizer steps after backward. Least: the least budget that holds for the whole "
        "loop, the optimizer's step included; in brackets the part above parameters, buffers, "
        "inputs and the optimizer's state. Peak: of a whole step, measured, above the bytes "
        "between steps. Step: the median; in brackets the median ratio to the plain loop's step of "
        "the same round, processes taking turns. CPU: processor time, that of copies included. "
        "Without a second time: measured one process after the other, on a machine under load. "
        "*Moved*: *within*, and values are moved to a file. Bits: weights, buffers, the "
        "optimizer's state and all losses after so many steps, against the plain loop. Where they "
        "are those of *after* only, the difference is not one of the step.",
        "",
        "| model | optimizer | way | budget | least, MiB | peak, MiB | extra compute | step, CPU s "
        "| step, s | bits |",
        "|---|---|---|---|--:|--:|--:|--:|--:|---|",
    ]
    rows = _newest(rows)
    for row in rows:
        alike = [r for r in rows if all(r[k] == row[k] for k in ("model", "optimizer", "steps"))]
        lines.append("| " + " | ".join(_cells(row, alike)) + " |")
    return "\n".join((*lines, ""))


def _cells(row: Row, alike: Sequence[Row]) -> list[str]:
    """Return the cells of a row, one of several of the same loop."""
    name = [MODELS[row["model"]][0], row["optimizer"], row["way"], _budget(row)]
    if "error" in row:
        return [*name, "", "", "", "", "", row["error"]]
    least, constants = row["least_bytes"], row.get("constants")
    text = "" if least is None else f"{least / MIB:.0f} ({(least - constants) / MIB:.0f})"
    extra = f"{row['overhead']:+.1%}" if "overhead" in row else ""
    seconds = [_seconds(row, clock, alike) for clock in ("cpu_s", "wall_s")]
    same = {r["way"] for r in alike if r["hash"] == row["hash"]} - {row["way"]}
    bits = (
        "equal" if "plain" in same else f"those of {', '.join(sorted(same))}" if same else "differ"
    )
    bits = "" if row["way"] == "plain" else f"{bits}, {row['steps']} steps"
    return [*name, text, f"{row['peak_bytes'] / MIB:.0f}", extra, *seconds, bits]


def _seconds(row: Row, clock: str, alike: Sequence[Row]) -> str:
    """Return the time of a row's step, and by how much it is more than plain PyTorch's."""
    if _took_turns(row):
        return f"{row[clock]:.2f} ({row[f'{clock}_of_plain'] - 1:+.1%})"
    if clock == "wall_s":
        return ""
    plain = next(r for r in alike if r["way"] == "plain")
    return f"{row[clock]:.2f} ({row[clock] / plain[clock] - 1:+.1%})"


def _took_turns(row: Row) -> bool:
    return "wall_s_of_plain" in row


def _newest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of each loop; only those whose processes took turns, if there are any."""
    turns = {(row["model"], row["optimizer"]) for row in rows if _took_turns(row)}
    return [r for r in rows if _took_turns(r) or (r["model"], r["optimizer"]) not in turns]


def _budget(row: Row) -> str:
    """Return the name of a row's budget."""
    if row["budget"] == AMPLE:
        return "ample"
    size = int(row["budget"])
    return "least" if size <= 1.006 * row["least_bytes"] + MIB else f"{size / MIB:.0f} MiB"


def main() -> None:
    """Measure, or only write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--optimizers", default=";".join(dict.fromkeys(o for _, o in RUNS)))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--table", action="store_true", help="only write the page")
    parser.add_argument("--child", nargs="+", help="used by the benchmark itself")
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    if not options.table:
        measure(
            options.models.split(","), options.optimizers.split(";"), options.ways, options.steps
        )
    rows = read_rows(ROWS)
    PAGE.write_text(document(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
