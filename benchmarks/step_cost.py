"""Processor time that a fitted step takes beyond plain PyTorch, on tensors too small to matter.

    python benchmarks/step_cost.py               # every model, a row each
    python benchmarks/step_cost.py linears --rounds 15
    python benchmarks/step_cost.py --table       # only write the table of docs/cuda-graph.md

Kernels of such tensors take next to nothing, so what is left is asking for them: on a GPU this
decides once it takes longer than the kernels. Nothing is recomputed. Plain and fitted steps take
turns with those of ``torch.compile(backend="aot_eager")``, which is PyTorch's own way to run a
captured step without fusing it. A row holds the least processor time of the thread that trains, as
other programs can only add to it. The model of one layer shows what each call takes; that is left
out of what each operator takes. Rows are appended to ``benchmarks/results/step_cost.jsonl``.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

import tightfit
from benchmarks.documents import table, with_section
from benchmarks.rows import Row, append_rows, read_rows
from benchmarks.training import circumstances

__all__ = ["PAGE", "RESULTS", "row_of", "section"]

RESULTS = Path(__file__).parent / "results" / "step_cost.jsonl"
PAGE = Path(__file__).parent.parent / "docs" / "cuda-graph.md"
_WARM_UP = 40  # steps: plans are settled, and nothing is compared any more


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        layers = (nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))
        self.layers = nn.Sequential(*layers, nn.ReLU(), *copy.deepcopy(layers))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layers(x) + x).relu()


def _linears() -> tuple[nn.Module, Tensor]:
    layers = [module for _ in range(21) for module in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(2, 8)


def _convolutions() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(_Residual(4) for _ in range(16))), torch.randn(1, 4, 4, 4)


def _one_layer() -> tuple[nn.Module, Tensor]:
    return nn.Linear(8, 8), torch.randn(2, 8)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "one layer": _one_layer,
    "linears": _linears,
    "convolutions": _convolutions,
}


def main(words: Sequence[str] | None = None) -> None:
    """Measure the models asked for; append and print the row of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--table", action="store_true", help="measure nothing, write the table")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    for name in () if options.table else options.models or MODELS:
        row = {**circumstances(1, rounds=options.rounds), **row_of(name, options)}
        append_rows(RESULTS, row)
        print(
            f"{row['model']:14} plain {1e6 * row['plain_s']:.0f} us, fitted "
            f"{1e6 * row['fitted_s']:.0f} us, aot_eager {1e6 * row['aot_eager_s']:.0f} us"
        )
    PAGE.write_text(with_section(PAGE.read_text(), "step cost", section(read_rows(RESULTS))))


def section(rows: Sequence[Row]) -> str:
    """Return a table of the newest row of each model."""
    newest = {row["model"]: row for row in rows}
    call = newest["one layer"]
    return table(
        ["model", "operators", "plain PyTorch", "fitted", "aot_eager", "more for each operator"],
        [
            [
                name,
                str(row["ops"]),
                *(f"{1e3 * row[way]:.2f} ms" for way in ("plain_s", "fitted_s", "aot_eager_s")),
                "" if row is call else f"{1e6 * _per_op_s(row, call):.1f} us",
            ]
            for name, row in newest.items()
        ],
    )


def _per_op_s(row: Row, call: Row) -> float:
    """Return what an operator takes beyond plain PyTorch; `call`: the row of a call of one."""
    more_s, call_s = (each["fitted_s"] - each["plain_s"] for each in (row, call))
    return (more_s - call_s) / (row["ops"] - call["ops"])


def row_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the processor time of a step in each way, and how many operators it has."""
    torch.manual_seed(0)
    plain, inputs = MODELS[name]()
    fitted = tightfit.fit(copy.deepcopy(plain), "1GiB", cache=False)
    compiled = torch.compile(copy.deepcopy(plain), backend="aot_eager")
    ways = {"plain_s": plain, "fitted_s": fitted, "aot_eager_s": compiled}
    for model in ways.values():
        _processor_s(model, inputs, _WARM_UP)
    times = [
        [_processor_s(model, inputs, options.steps) for model in ways.values()]
        for _ in range(options.rounds)
    ]
    return {
        "model": name,
        "modules": len(list(plain.modules())),
        "ops": len(tightfit.report(fitted).graph.ops),
        **dict(zip(ways, map(min, zip(*times, strict=True)), strict=True)),
    }


def _processor_s(model: nn.Module, inputs: Tensor, steps: int) -> float:
    """Return the mean processor time of steps; their backward runs in this thread, too."""
    begin_s = time.thread_time()
    for _ in range(steps):
        model.zero_grad()
        model(inputs).sum().backward()
    return (time.thread_time() - begin_s) / steps


if __name__ == "__main__":
    main()
