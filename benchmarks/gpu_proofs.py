"""Prove a model of the zoo on a device at several budgets; rows as JSON lines.

    python benchmarks/gpu_proofs.py resnet50 --batch 64 --size 224 --device cuda

Exits with 1 if bits differed or a peak exceeded its budget.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
import torch

from benchmarks.rows import append_rows
from benchmarks.training import circumstances
from tightfit.errors import InfeasibleBudget
from tightfit.studies.comparison import Comparison
from tightfit.studies.workload import with_loss_inside
from tightfit.zoo import make


def main(words: Sequence[str] | None = None) -> int:
    """Prove, append the rows; return the exit code."""
    arguments = _arguments(words)
    # bits can only be compared where kernels give the same ones twice
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return _prove(arguments)
    finally:
        torch.use_deterministic_algorithms(before)


def _prove(arguments: argparse.Namespace) -> int:
    torch.manual_seed(0)
    keys = ("batch", "size", "sequence", "dropout")
    settings = {k: v for k in keys if (v := getattr(arguments, k)) is not None}
    example = with_loss_inside(make(arguments.model, **settings).to(arguments.device))
    comparison = Comparison(example, steps=3, name=arguments.model, limits=(5.0, 1e-3), cache=False)
    common = {
        "model": arguments.model,
        "settings": settings,
        **circumstances(torch.get_num_threads(), 0, arguments.device),
    }
    rows = [
        {**common, **_row(comparison, ratio)} for ratio in map(float, arguments.ratios.split(","))
    ]
    append_rows(arguments.output, *rows)
    for row in rows:
        print({key: row.get(key) for key in ("model", "budget_ratio", "bitwise", "holds", "error")})
    return 0 if all(row.get("bitwise") and row.get("holds") for row in rows) else 1


def _row(comparison: Comparison, ratio: float) -> dict[str, Any]:
    """Return what a proof at a ratio of eager's activation peak showed, or why there is none."""
    try:
        proof = comparison.at(comparison.budget_of(ratio), rounds=0)
    except InfeasibleBudget as error:
        return {"budget_ratio": ratio, "error": str(error)}
    return {
        **{k: v for k, v in msgspec.to_builtins(proof).items() if k not in ("model", "device")},
        "budget_ratio": ratio,
        "holds": proof.holds,
        "prediction_error": proof.prediction_error,
    }


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--size", type=int)
    parser.add_argument("--sequence", type=int)
    parser.add_argument("--dropout", type=float)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ratios", default="0.8,0.6", help="of eager's activation peak")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
