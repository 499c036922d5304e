"""Prove models at several budgets, each in a process of its own; rows as JSON lines.

    python benchmarks/proofs.py --models resnet50,gpt2 --budgets 0.8,0.6,minimum --rounds 0
    python benchmarks/proofs.py --suite models --rounds 0

The suite ``zoo`` has the zoo's models, ``models`` those of ``real_models.py``. A row is what
``tightfit prove --json`` prints, with the model, the budget asked for, the date and the commit.
Rows are appended to ``benchmarks/results/proofs.jsonl`` and ``proofs_models.jsonl``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RESULTS = {
    "zoo": FOLDER / "results" / "proofs.jsonl",
    "models": FOLDER / "results" / "proofs_models.jsonl",
}
TARGET = {"zoo": "zoo:{}", "models": f"{FOLDER / 'real_models.py'}:{{}}"}
MODELS = {
    "zoo": "resnet50,mobilenet_v2,unet,gpt2,bert,vit,vgg16",
    "models": "gpt2,llama,mistral,qwen,bert,t5,vit,swin,convnext,whisper,clip,mixtral,"
    "monai_unet,monai_densenet,monai_swin_unetr",
}


def main() -> None:
    """Run every proof asked for and append its row as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=sorted(MODELS), default="zoo")
    parser.add_argument("--models", help="comma-separated; default: all of the suite")
    parser.add_argument("--budgets", default="0.8,0.6,minimum")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    for model in (options.models or MODELS[options.suite]).split(","):
        for budget in options.budgets.split(","):
            row = prove(model, budget, options)
            with RESULTS[options.suite].open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(line(row), flush=True)


def prove(model: str, budget: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of one proof."""
    asked = ["--budget", budget] if not budget[0].isdigit() else ["--budget-ratio", budget]
    target = TARGET[options.suite].format(model)
    command = [sys.executable, "-m", "tightfit", "prove", target, *asked, "--json"]
    command += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
    command += ["--threads", str(options.threads)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if not result.stdout.strip():
        raise SystemExit(f"{' '.join(command)} printed nothing:\n{result.stderr[-2000:]}")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    return {
        "model": model,
        "asked": budget,
        "exit_code": result.returncode,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "threads": options.threads,
        "load": round(os.getloadavg()[0], 1),
        **json.loads(result.stdout.strip().splitlines()[-1]),
    }


def line(row: dict[str, Any]) -> str:
    """Return a row as one line for people."""
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
