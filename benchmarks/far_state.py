"""A model whose parameters, gradients and AdamW state take 2.5 times the budget.

python benchmarks/far_state.py [--model gpt2 --times 2.4] [--steps 6]

A model of the zoo on a small batch. Plain PyTorch trains first, then a fitted copy: the optimizer's
steps are taken in backward, and the state's large tensors are in a file. Parameters and state are
compared bit by bit at the end. The row goes to ``benchmarks/results/far_state.jsonl``.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import tightfit
from benchmarks.rows import append_rows
from benchmarks.training import circumstances
from tightfit.zoo import Example, make

BATCHES: dict[str, dict[str, Any]] = {
    "gpt2": {"batch": 1, "sequence": 64, "dropout": 0.0},
    "vit": {"batch": 1},
}
ROWS = Path(__file__).parent / "results" / "far_state.jsonl"


def trained(model: torch.nn.Module, optimizer: Any, example: Example, steps: int) -> float:
    """Train; return the median time of a step but the first two."""
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        called_with(model, example).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])


def called_with(model: torch.nn.Module, example: Example) -> torch.Tensor:
    """Return the loss of a model on the example's batch."""
    own = example.args if isinstance(example.args, dict) else {}
    output = model(*(() if own else example.args), **own)
    return output if example.loss is None else example.loss(output, example.target)


def main() -> None:
    """Run and write the row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(BATCHES), default="gpt2")
    parser.add_argument("--times", type=float, default=2.5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    example = make(options.model, **BATCHES[options.model])
    plain, fitted = example.model, copy.deepcopy(example.model)
    adams = [torch.optim.AdamW(m.parameters(), lr=1e-4) for m in (plain, fitted)]
    plain_s = trained(plain, adams[0], example, options.steps)
    own_bytes = sum(p.nbytes for p in plain.parameters())
    budget = int(4 * own_bytes / options.times)
    far = tightfit.Offload("16GiB", options.folder, optimizer_state=True)
    keywords: dict[str, Any] = {"update_in_backward": True, "offload": far}
    tightfit.fit(fitted, budget, optimizer=adams[1], **keywords)
    fitted_s = trained(fitted, adams[1], example, options.steps)
    measured = tightfit.report(fitted).measured
    states = [adam.state_dict()["state"] for adam in adams]
    equal = all(map(torch.equal, plain.state_dict().values(), fitted.state_dict().values()))
    equal = equal and all(
        torch.equal(value, states[1][number][key])
        for number, state in states[0].items()
        for key, value in state.items()
    )
    row = {
        "model": options.model,
        "parameter_bytes": own_bytes,
        "held_by_plain_bytes": 4 * own_bytes,
        "budget_bytes": budget,
        "peak_bytes": measured.peak_bytes if measured is not None else None,
        "equal": equal,
        "plain_s": plain_s,
        "fitted_s": fitted_s,
        **circumstances(threads=1, rounds=1),
    }
    append_rows(ROWS, row)
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
