"""Show on one GPU, in ten minutes, what the README promises: `make gpu-proof`.

    python benchmarks/gpu_proof.py

Runs the tests marked `gpu`, then four models within what the device keeps to: reserved bytes,
retries and launch time, with a limit, without one, at planned addresses. Then come whole training
loops, values that are moved to the host and back, proofs (bit by bit, peak within the budget), and
training rows of ResNet-50 and GPT-2 at two ratios. Each stage runs in a process of its own, within
what is left of the time. Rows are appended to ``benchmarks/results/gpu_limit.jsonl``,
``gpu_loops.jsonl``, ``offload_gpu.jsonl``, ``gpu_proofs.jsonl`` and ``gpu_training.jsonl`` with the
device, the versions and the commit; ``python benchmarks/readme.py`` puts the last two into the
README. What the device kept to is printed as one table. Exits with 0 only if everything held.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import gpu_limit
from benchmarks.rows import read_rows

FOLDER = Path(__file__).resolve().parent
ROWS = FOLDER / "results"
TESTS = ("tests/gpu", "tests/contract/test_kernels.py")

MODELS = {
    "resnet50": ("--batch", "64", "--size", "224"),
    "gpt2": ("--batch", "4", "--sequence", "1024", "--dropout", "0"),
}

LOOPS = ("scaled_gradients", "fused_steps", "prefetched_batches", "steps_in_backward", "detector")

_LED = ("--ways", "limit,arena")
LIMITS = {
    "resnet50": ("--ratio", "0.4", "--batch", "128", "--size", "224"),  # without a limit, too
    "gpt2": ("--ratio", "0.4", "--batch", "8", "--sequence", "1024", "--dropout", "0", *_LED),
    "vit": ("--ratio", "0.6", "--batch", "64", *_LED),
    "unet": ("--ratio", "0.5", "--batch", "16", *_LED),
}

Run = Callable[[Sequence[str], float], int]


class Stage(NamedTuple):
    """A part of the proof."""

    name: str
    command: tuple[str, ...]
    longest_s: float


def stages(rows: Path = ROWS, python: str = sys.executable) -> list[Stage]:
    """Return what is run, in order; rows go into a folder."""
    found = [Stage("tests", (python, "-m", "pytest", "-m", "gpu", *TESTS), 130)]
    for model, settings in LIMITS.items():
        output = ("--device", "cuda", "--output", str(rows / "gpu_limit.jsonl"))
        limit = (python, "benchmarks/gpu_limit.py", model, *settings, *output)
        found.append(Stage(f"limit of {model}", limit, 60 if "--ways" in settings else 75))
    loops = (python, "benchmarks/loops.py", *LOOPS, "--device", "cuda", "--steps", "10", "--output")
    found.append(Stage("training loops", (*loops, str(rows / "gpu_loops.jsonl")), 80))
    moves = (python, "benchmarks/offload_gpu.py", "--device", "cuda", "--output")
    found.append(Stage("offload", (*moves, str(rows / "offload_gpu.jsonl")), 60))
    for model, settings in MODELS.items():
        common = (model, *settings, "--device", "cuda", "--output")
        prove = (python, "benchmarks/gpu_proofs.py", *common, str(rows / "gpu_proofs.jsonl"))
        train = (python, "benchmarks/training.py", *common, str(rows / "gpu_training.jsonl"))
        ratios = ("--ratios", "0.6,0.5", "--rounds", "15", "--time-limit", "10")
        found.append(Stage(f"proofs of {model}", prove, 40))
        found.append(Stage(f"training rows of {model}", (*train, *ratios), 45))
    return found


def run_all(todo: Sequence[Stage], total_s: float, run: Run) -> list[tuple[str, str]]:
    """Run stages one after the other within a time; return each one's name and how it ended."""
    deadline = time.monotonic() + total_s
    ended: list[tuple[str, str]] = []
    for stage in todo:
        left_s = min(stage.longest_s, deadline - time.monotonic())
        if left_s <= 0:
            ended.append((stage.name, "not run: no time left"))
            continue
        try:
            code = run(stage.command, left_s)
        except subprocess.TimeoutExpired:
            ended.append((stage.name, f"stopped after {left_s:.0f} s"))
            continue
        ended.append((stage.name, "held" if code == 0 else f"failed (exit code {code})"))
    return ended


def run_process(command: Sequence[str], longest_s: float) -> int:
    """Run a command from the repository's root; return its exit code."""
    print("$", *command, flush=True)
    return subprocess.run(command, cwd=FOLDER.parent, timeout=longest_s, check=False).returncode


def unusable_reason() -> str | None:
    """Return why there is no GPU to run on, or None."""
    import torch

    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA: install a build with it"
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device: no GPU, no driver, or CUDA_VISIBLE_DEVICES hides it"
    return None


def main(words: Sequence[str] | None = None) -> int:
    """Run the proof; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--dry-run", action="store_true", help="only list what would run")
    arguments = parser.parse_args(words)
    todo = stages()
    if arguments.dry_run:
        for stage in todo:
            print(f"{stage.name} (at most {stage.longest_s:.0f} s): {' '.join(stage.command)}")
        return 0
    reason = unusable_reason()
    if reason is not None:
        print(f"gpu-proof needs a GPU: {reason}. Nothing was run, no row was written.")
        return 2
    began = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    ended = run_all(todo, 60 * arguments.minutes, run_process)
    rows = [row for row in read_rows(ROWS / "gpu_limit.jsonl") if row["date"] >= began]
    print(gpu_limit.table(rows))
    for name, how in ended:
        print(f"{name:28} {how}")
    print("python benchmarks/readme.py puts the rows into the README")
    return 0 if all(how == "held" for _, how in ended) else 1


if __name__ == "__main__":
    sys.exit(main())
