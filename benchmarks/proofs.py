"""Prove models at several budgets, each model in a process of its own; rows as JSON lines.

    python benchmarks/proofs.py --models resnet50,gpt2 --budgets 0.8,0.6,minimum --rounds 0
    python benchmarks/proofs.py --suite models --rounds 0 --steps 2

The suite ``zoo`` has the zoo's models, ``models`` those of ``real_models.py``. A row is what
``tightfit prove --json`` says, with the model, the budget asked for, the date and the commit.
Rows are appended to ``benchmarks/results/proofs.jsonl`` and ``proofs_models.jsonl``; models that
have rows for all budgets are passed over with ``--missing``.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
import torch

from benchmarks.rows import append_rows, read_rows
from tightfit.api.prove import MINIMUM
from tightfit.errors import CaptureError, InfeasibleBudget, TightfitError
from tightfit.planners.base import Limits
from tightfit.studies.comparison import Comparison
from tightfit.studies.model import load_example

FOLDER = Path(__file__).parent
RESULTS = {
    "zoo": FOLDER / "results" / "proofs.jsonl",
    "models": FOLDER / "results" / "proofs_models.jsonl",
}
TARGET = {"zoo": "zoo:{}", "models": f"{FOLDER / 'real_models.py'}:{{}}"}
MODELS = {
    "zoo": "resnet50,mobilenet_v2,unet,gpt2,bert,vit,vgg16",
    "models": "gpt2,llama,mistral,qwen,bert,t5,vit,swin,convnext,whisper,clip,mixtral,"
    "m2m100,wav2vec2_ctc,monai_unet,monai_densenet,monai_swin_unetr",
}


def main() -> None:
    """Run every proof asked for and append its row as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=sorted(MODELS), default="zoo")
    parser.add_argument("--models", help="comma-separated; default: all of the suite")
    parser.add_argument("--budgets", default="0.8,0.6,minimum")
    parser.add_argument("--missing", action="store_true", help="only models without their rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--costs", default="measured", help="as tightfit.fit takes them")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for each plan")
    options = parser.parse_args()
    models = (options.models or MODELS[options.suite]).split(",")
    if options.missing:
        models = [m for m in models if not _has_rows(m, options)]
    if len(models) == 1:
        prove(models[0], options)
        return
    for model in models:
        own = [f"--{key}={value}" for key, value in vars(options).items() if _is_passed(key, value)]
        own = [text.replace("time_limit", "time-limit") for text in own]
        subprocess.run([sys.executable, __file__, *own, f"--models={model}"], check=False)


def _is_passed(key: str, value: Any) -> bool:
    return key not in ("models", "missing") and value is not None


def _has_rows(model: str, options: argparse.Namespace) -> bool:
    rows = read_rows(RESULTS[options.suite])
    done = {r["asked"] for r in rows if Path(r["model"]).name.split(":")[-1] == model}
    return done >= set(options.budgets.split(","))


def prove(model: str, options: argparse.Namespace) -> None:
    """Prove one model at every budget; capture and costs are shared by all of them."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    target = TARGET[options.suite].format(model)
    comparison = Comparison(
        load_example(target),
        steps=options.steps,
        name=target,
        costs=options.costs,
        limits=Limits(seconds=options.time_limit),
    )
    for row in rows(comparison, model, options):
        append_rows(RESULTS[options.suite], row)
        print(line(row), flush=True)


def rows(
    comparison: Comparison, model: str, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the row of each budget; the least one first, whose plan others may fall back on."""
    for budget in sorted(options.budgets.split(","), reverse=True):
        row = {
            "model": model,
            "asked": budget,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "commit": subprocess.run(
                ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
            ).stdout.strip(),
            "threads": options.threads,
            "costs": options.costs,
            "load": round(os.getloadavg()[0], 1),
        }
        try:
            if budget == MINIMUM:
                budget_bytes = comparison.least_bytes()
            else:
                budget_bytes = comparison.budget_of(float(budget))
            proof = comparison.at(budget_bytes, rounds=options.rounds)
            yield {**msgspec.to_builtins(proof), **row, "exit_code": int(not proof.succeeded)}
        except CaptureError as error:
            yield {**row, "exit_code": 2, "message": str(error)}
            return
        except InfeasibleBudget as error:
            yield {**row, "exit_code": 3, "message": str(error)}
        except TightfitError as error:
            yield {**row, "exit_code": 2, "message": str(error)}


def line(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    if row["exit_code"] not in (0, 1):
        return f"{row['model']:14} {row['asked']:8} exit {row['exit_code']}: {row.get('message')}"
    planned = row["planned_peak_bytes"] - row["constant_bytes"]
    return (
        f"{row['model']:14} {row['asked']:8} bitwise {row['bitwise']}, measured "
        f"{row['measured_peak_bytes']} <= {row['budget_bytes']}: "
        f"{row['measured_peak_bytes'] <= row['budget_bytes']}, planned activations {planned}, "
        f"overhead {row['overhead']:.4f}, time {row['time_ratio']}, {row['status']}"
    )


if __name__ == "__main__":
    main()
