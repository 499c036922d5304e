"""Training loops as people write them, run plainly and within a budget, and measured as a whole.

    python benchmarks/loops.py                     # all of them: an hour on two cores
    python benchmarks/loops.py gan diffusion --small --steps 6
    python benchmarks/loops.py scaled_gradients fused_steps --device cuda
    python benchmarks/loops_table.py               # writes docs/loops.md from the rows

Each loop of `training_loops` runs in processes of its own, with an empty cache: plainly, then
within `RATIO` of the most that the plain program held; where that is refused, within the budget
that the error advises, a few times at most. A row compares every loss of every step and the
parameters in the end bit by bit, and says the most bytes allocated at any instant from `fit` on,
first call and optimizer included, over the budget (what exactly is counted: `training_loops.run`),
and the seconds of the first six steps of both. Rows are appended to
``benchmarks/results/loops.jsonl``.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.rows import append_rows
from benchmarks.training import circumstances
from benchmarks.training_loops import LOOPS, Life, Loop, Run, live, loop_named

__all__ = ["RATIO", "compared", "fitted_row", "is_as_promised", "row_of"]

RESULTS = Path(__file__).parent / "results" / "loops.jsonl"
RATIO = 0.6
_TIMED_STEPS = 6
_MOST_ADVICE = 4
_LONGEST_S = 900.0
_PREFIX = "life of the loop: "


def main(words: Sequence[str] | None = None) -> int:
    """Run the loops asked for; append the row of each; return 1 if any was not as promised."""
    options = _arguments(words)
    if options.rank is not None:
        _be_a_process(options)
    held = True
    for name in options.loops or LOOPS:
        row = {
            **circumstances(1, rounds=1, device=options.device),
            **row_of(loop_named(name), options.steps, options.small, options.device),
        }
        append_rows(options.output, row)
        print(_line(row), flush=True)
        held = held and ("skipped" in row or is_as_promised(row))
    return 0 if held else 1


def is_as_promised(row: dict[str, Any]) -> bool:
    """Whether a loop trained to its end with the bits of plain PyTorch, within its budget."""
    return bool(row.get("parameters_equal") and row["losses_equal"] and not row["steps_over"])


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("loops", nargs="*", metavar="LOOP", help=", ".join(LOOPS))
    parser.add_argument("--steps", type=int, default=26, help="six that are timed, and 20 more")
    parser.add_argument("--small", action="store_true", help="models as small as tests need them")
    parser.add_argument("--device", default="cpu", help="cuda: what is reserved there is counted")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(words)


# -- one loop -----------------------------------------------------------------------------------


def row_of(loop: Loop, steps: int, small: bool, device: str = "cpu") -> dict[str, Any]:
    """Run a loop plainly and within a budget; return what was found."""
    row: dict[str, Any] = {"loop": loop.name, "small": small, "steps": steps, "on": device}
    missing = [name for name in loop.packages if importlib.util.find_spec(name) is None]
    if missing:
        way_out = "pip install tightfit[libraries]"
        return {**row, "skipped": f"{', '.join(missing)} is not installed: {way_out}"}
    within = lambda budget: in_processes(loop, budget, steps, small, device=device)  # noqa: E731
    plain = within(None)
    if plain.error:
        return {**row, "error": f"plain PyTorch: {plain.error}"}
    return {**row, **fitted_row(plain, within)}


def fitted_row(plain: Life, within: Callable[[int], Life]) -> dict[str, Any]:
    """Run a loop within a share of plain's peak; where refused, within what the error advises."""
    row: dict[str, Any] = {"plain_peak_bytes": plain.whole_bytes, "budget": f"{RATIO:g} of plain"}
    fitted = within(int(RATIO * plain.whole_bytes))
    for followed in range(1, _MOST_ADVICE + 1):
        if fitted.advised_bytes is None or fitted.advised_bytes <= (fitted.budget_bytes or 0):
            break
        row |= {"budget": "advised", "followed": followed, "refused": fitted.error}
        fitted = within(fitted.advised_bytes)
    return {**row, **compared(plain, fitted)}


def compared(plain: Life, fitted: Life) -> dict[str, Any]:
    """Return how a fitted loop did compared with the plain one."""
    assert fitted.budget_bytes is not None
    steps = len(fitted.seconds)
    return {
        "budget_bytes": fitted.budget_bytes,
        "found_bytes": fitted.found_bytes,
        "largest_bytes": fitted.largest_bytes,
        "over_budget": round(fitted.largest_bytes / fitted.budget_bytes, 4),
        "steps_over": [
            step for step, peak in enumerate(fitted.peaks_bytes, 1) if peak > fitted.budget_bytes
        ],
        "steps_done": steps,
        "losses_equal": fitted.losses == plain.losses[: len(fitted.losses)],
        "parameters_equal": fitted.parameters == plain.parameters if not fitted.error else None,
        "plain_s": plain.seconds[:_TIMED_STEPS],
        "fitted_s": fitted.seconds[:_TIMED_STEPS],
        "error": fitted.error,
    }


# -- processes ----------------------------------------------------------------------------------


def in_processes(
    loop: Loop,
    budget_bytes: int | None,
    steps: int,
    small: bool,
    longest_s: float = _LONGEST_S,
    device: str = "cpu",
) -> Life:
    """Run a loop in as many processes as it takes; return the life of them together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, loop.name, f"--steps={steps}", f"--port={port}"]
    command += [f"--device={device}"]
    command += ["--small"] * small
    if budget_bytes is not None:
        command.append(f"--budget={budget_bytes}")
    started: list[subprocess.Popen[str]] = []
    late = threading.Timer(longest_s, lambda: [process.kill() for process in started])
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TIGHTFIT_CACHE_DIR": cache}
        for rank in range(loop.ranks):
            started.append(_process([*command, f"--rank={rank}"], environment))
        late.start()
        try:
            lives = [_life(process, budget_bytes) for process in started]
        finally:
            late.cancel()
            for process in started:  # each waits until all have printed
                process.kill()
                process.communicate()
    return together(lives)


def _process(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment
    )


def _life(process: subprocess.Popen[str], budget_bytes: int | None) -> Life:
    """Return the life a process tells of, or what it says instead."""
    assert process.stdout is not None
    said = "no word"
    for line in process.stdout:
        if line.startswith(_PREFIX):
            fields = json.loads(line.removeprefix(_PREFIX))
            return Life(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
        said = line.strip() or said
    late = " (it took too long)" * (process.wait() < 0)
    return Life(budget_bytes, 0, 0, (), (), (), "", f"{said}{late}")


def together(lives: list[Life]) -> Life:
    """Return the life of processes that train together: the most any of them held."""
    first = lives[0]
    return dataclasses.replace(
        first,
        whole_bytes=max(life.whole_bytes for life in lives),
        found_bytes=max(life.found_bytes for life in lives),
        peaks_bytes=tuple(map(max, zip(*(life.peaks_bytes for life in lives), strict=False))),
        losses=tuple(map(" ".join, zip(*(life.losses for life in lives), strict=False))),
        parameters=" ".join(life.parameters for life in lives),
        error=next((life.error for life in lives if life.error), ""),
        advised_bytes=max((life.advised_bytes or 0 for life in lives), default=0) or None,
    )


def _be_a_process(options: argparse.Namespace) -> None:
    """Run one loop here and tell its life on the last line."""
    torch.set_num_threads(1)
    if options.device != "cpu":
        torch.set_default_device(options.device)
    run = Run(
        options.budget,
        steps=options.steps,
        small=options.small,
        rank=options.rank,
        port=options.port,
        device=options.device,
    )
    life = live(loop_named(options.loops[0]).function, run)
    print(f"\n{_PREFIX}{json.dumps(dataclasses.asdict(life))}", flush=True)
    sys.stdin.read()  # until the others have printed, too: a process that ends early blocks them
    os._exit(0)  # groups of processes end badly while the interpreter is torn down


def _line(row: dict[str, Any]) -> str:
    if "over_budget" not in row:
        return f"{row['loop']:26} {row.get('skipped') or row.get('error')}"
    times = f"{sum(row['plain_s']):.2f} -> {sum(row['fitted_s']):.2f} s"
    return (
        f"{row['loop']:26} {row['budget']:12} {row['budget_bytes'] / 2**20:8.2f} MiB, held "
        f"{row['over_budget']:.4f}, over in {row['steps_over']}, losses {row['losses_equal']}, "
        f"parameters {row['parameters_equal']}, {times} {row['error'][:200]}"
    )


if __name__ == "__main__":
    sys.exit(main())
