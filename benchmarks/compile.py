"""Compiled plans and torch.compile with its activation memory budget: time at equal peak.

    python benchmarks/compile.py mlp
    python benchmarks/compile.py gpt --shares 1,0.75,0.5,0.25,0

One process, one thread, rounds interleaved, processor time, as in ``benchmarks/training.py``, but
each timed step follows one of the same way: tenths of a percent count here. For
every share of ``torch._functorch.config.activation_memory_budget`` the step is compiled by
torch.compile and its peak measured; tightfit then gets exactly that peak as its budget, compiled
and operator by operator. Rows are appended to ``benchmarks/results/compile.jsonl``, from which
``benchmarks/compile_table.py`` writes the table in ``docs/compile.md``.
"""

from __future__ import annotations

import argparse
import gc
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor, nn

import tightfit
from benchmarks.pytorch_methods import LossFunction
from benchmarks.rows import append_rows
from benchmarks.training import Method, circumstances, measured, time_interleaved
from tightfit.allocator import measure_peak
from tightfit.cli.console import terminal_progress
from tightfit.errors import InfeasibleBudget
from tightfit.session.handles import fitted_of
from tightfit.studies.workload import Workload
from tightfit.zoo.example import Example
from tightfit.zoo.gpt2 import GPT2

RESULTS = Path(__file__).parent / "results" / "compile.jsonl"
SEED = 0


class Block(nn.Module):
    """A feed-forward block with a LayerNorm and a shortcut: [N, D] -> [N, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


def mlp(width: int = 256, rows: int = 1024) -> Example:
    """Return six feed-forward blocks on a batch of vectors."""
    model = nn.Sequential(*(Block(width) for _ in range(6)))
    x, target = torch.randn(rows, width), torch.randn(rows, width)
    return Example(model, nn.functional.mse_loss, (x,), target)


def gpt(batch: int = 8, sequence: int = 128) -> Example:
    """Return a GPT of two layers that returns its loss, without dropout."""
    model = GPT2(layers=2, width=192, heads=6, vocabulary=2048, context=sequence, dropout=0.0)
    tokens, targets = (torch.randint(0, 2048, (batch, sequence)) for _ in range(2))
    return Example(model, None, (tokens, targets), None)


MODELS: dict[str, Callable[[], Example]] = {"mlp": mlp, "gpt": gpt}


def main(words: Sequence[str] | None = None) -> None:
    """Run one benchmark and append its rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--shares", default="1,0.75,0.5,0.25,0")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args(words)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(SEED)
    workload = Workload(MODELS[arguments.model](), SEED)
    eager = Method({"way": "eager"}, workload.loss_of)
    methods = [eager]
    torch._dynamo.config.error_on_recompile = True
    note_peak(eager, workload)
    reference = gradients_of(eager, workload)
    for share in map(float, arguments.shares.split(",")):
        methods += _at(share, workload)
    for method in methods:
        if "error" not in method.row:
            method.row["difference"] = difference(gradients_of(method, workload), reference)
    running = [e for e in methods if "error" not in e.row]
    with terminal_progress() as progress:
        time_interleaved(running, workload, arguments.rounds, progress)
    common = {"model": arguments.model, **circumstances(arguments.threads, arguments.rounds)}
    for method in methods:
        row = {**common, **method.row, **measured(method, eager)}
        print({k: row.get(k) for k in ("way", "share", "peak_bytes", "time_ratio", "error")})
        append_rows(arguments.output, row)


def _at(share: float, workload: Workload) -> list[Method]:
    """Return torch.compile with a share, and tightfit with the peak that it has."""
    theirs = Method({"way": "torch.compile", "share": share}, _compiled(workload, share))
    note_peak(theirs, workload)
    workload.model.zero_grad(set_to_none=True)
    budget_bytes = workload.constant_bytes() + theirs.row["peak_bytes"]
    methods = [theirs]
    for compiled in (True, False):
        name = "tightfit compiled" if compiled else "tightfit"
        row = {"way": name, "share": share, "budget_bytes": budget_bytes}
        methods.append(_planned(workload, row, compiled))
    return methods


def _compiled(workload: Workload, share: float) -> LossFunction:
    """Return the loss compiled by torch.compile, planned with a share of saved activations.

    Dynamo keeps what it compiled by code object: each share needs one of its own.
    """

    def loss_of(*args: Any, **kwargs: Any) -> Tensor:
        return workload.loss_of(*args, **kwargs)

    code = loss_of.__code__.replace(co_name=f"loss_at_{share:g}")
    own = types.FunctionType(code, globals(), closure=loss_of.__closure__)
    compiled = torch.compile(own, fullgraph=True)
    with torch._functorch.config.patch(activation_memory_budget=share):
        compiled(*workload.args, **workload.kwargs).backward()
    return compiled


def _planned(workload: Workload, row: dict[str, Any], compiled: bool) -> Method:
    step = tightfit.step(
        workload.loss_of,
        modules=workload.model,
        budget=row["budget_bytes"],
        optimizer=torch.optim.SGD(workload.model.parameters(), lr=1e-3),  # has no state
        on_exceed="warn",
        cache=False,
        compile=compiled,
    )
    session = fitted_of(step)
    method = Method(row, step, leave=lambda: session.close_step() and None)
    try:
        note_peak(method, workload)
        while session.is_tuning:
            note_peak(method, workload)
        note_peak(method, workload)
    except InfeasibleBudget as error:
        row["error"] = str(error)
        return method
    report = session.report()
    row |= {"overhead": report.overhead, "compiled": report.compiled}
    return method


def note_peak(method: Method, workload: Workload) -> None:
    """Note the peak of a second step above its start, new gradients included."""
    for _ in range(2):
        workload.model.zero_grad(set_to_none=True)
        gc.collect()
        peak = method.run(
            lambda function: measure_peak(
                lambda: function(*workload.args, **workload.kwargs).backward()
            )[1]
        )
    method.row["peak_bytes"] = peak.peak_bytes


def gradients_of(method: Method, workload: Workload) -> list[Tensor]:
    """Return the gradients of a step from the first state."""
    workload.reset()
    method.run(lambda function: function(*workload.args, **workload.kwargs).backward())
    return [p.grad.clone() for p in workload.model.parameters() if p.grad is not None]


def difference(ours: list[Tensor], reference: list[Tensor]) -> float:
    """Return the largest difference of a gradient, as a share of its largest element."""
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, reference, strict=True)
    )


if __name__ == "__main__":
    main()
