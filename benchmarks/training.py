"""Train real models with tightfit at several ratios and with PyTorch's own ways, interleaved.

    python benchmarks/training.py resnet50 --ratios 0.8,0.6,0.5,0.47,0.4
    python benchmarks/training.py gpt2 --ratios 0.6,0.5 --dropout 0
    python benchmarks/training.py resnet50 --ratios 1.1 --rounds 30 --without-others  # machinery

One process, one thread. Peaks count what the allocator gave out above the start of the step, new
gradients included; a ratio is a peak as a share of plain PyTorch's. Times are processor times of
forward and backward; a time ratio is the median over rounds of the ratio to plain PyTorch in the
same round, whose order alternates; on a GPU they are the device's. Every timed step follows one of
the same way, so that it finds the heap as its own steps leave it. Rows are appended to
``benchmarks/results/training.jsonl``.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.pytorch_methods import (
    LossFunction,
    checkpoint_per_block,
    min_cut,
    sequential_checkpoint,
)
from benchmarks.rows import append_rows
from tightfit.allocator import measure_peak
from tightfit.alternatives.registry import EXACTNESS
from tightfit.cli.console import terminal_progress
from tightfit.errors import InfeasibleBudget
from tightfit.planners.background import searching
from tightfit.progress import Progress
from tightfit.session.handles import PlannedStep
from tightfit.studies.comparison import Comparison
from tightfit.studies.training import step_time
from tightfit.studies.workload import Workload, with_loss_inside
from tightfit.zoo import make

RESULTS = Path(__file__).parent / "results" / "training.jsonl"
_LONGEST_SEARCH_S = 120.0


@dataclass
class Method:
    """A method to run the step, and its measurements."""

    row: dict[str, Any]
    function: LossFunction
    enter: Callable[[], None] = lambda: None
    leave: Callable[[], None] = lambda: None
    times: list[float] = field(default_factory=list)

    def run(self, action: Callable[[LossFunction], Any]) -> Any:
        """Call an action with the loss function while this method is active."""
        self.enter()
        try:
            return action(self.function)
        finally:
            self.leave()


def main(words: Sequence[str] | None = None) -> None:
    """Run one benchmark and append its rows."""
    arguments = _arguments(words)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    settings = {
        key: value
        for key in ("batch", "size", "sequence", "dropout")
        if (value := getattr(arguments, key)) is not None
    }
    with terminal_progress() as progress:
        comparison = Comparison(
            with_loss_inside(make(arguments.model, **settings).to(arguments.device)),
            steps=2,
            name=arguments.model,
            exactness=arguments.exactness,
            limits=(arguments.time_limit, 1e-4),
            cache=False,  # plan anew: a cached plan may be of an older planner
            progress=progress,
        )
        methods = [Method({"way": "eager"}, comparison.workload.loss_of)]
        if not arguments.without_others:
            methods += _others(comparison.workload, arguments)
        methods += _planned(comparison, arguments)
        for method in methods:
            _check(method, comparison.workload)
        time_interleaved(
            [e for e in methods if "error" not in e.row],
            comparison.workload,
            arguments.rounds,
            progress,
        )
    if arguments.exactness != "bitwise":
        settings["exactness"] = arguments.exactness
    common = {"model": arguments.model, "settings": settings}
    common |= circumstances(arguments.threads, arguments.rounds, arguments.device)
    eager = methods[0]
    for method in methods:
        row = {**common, **method.row, **measured(method, eager)}
        print(_line(row))
        append_rows(arguments.output, row)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=("resnet50", "gpt2", "mobilenet_v2", "unet"))
    parser.add_argument("--ratios", default="0.8,0.6,0.5,0.4")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds for each plan")
    parser.add_argument("--segments", default="4,6", help="of checkpoint_sequential")
    parser.add_argument("--min-cut", default="0.75,0.5", help="values of activation_memory_budget")
    parser.add_argument(
        "--without-others", action="store_true", help="only eager and tightfit, no other way"
    )
    parser.add_argument(
        "--exactness", default="bitwise", choices=EXACTNESS, help="of what tightfit may choose"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--size", type=int)
    parser.add_argument("--sequence", type=int)
    parser.add_argument("--dropout", type=float)
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args(words)


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",") if word]


def _others(workload: Workload, arguments: argparse.Namespace) -> list[Method]:
    """Return PyTorch's own ways to train in less memory."""
    methods = [Method({"way": "checkpoint per block"}, checkpoint_per_block(workload))]
    for segments in map(int, _numbers(arguments.segments)):
        way = sequential_checkpoint(workload, segments)
        if way is not None:
            methods.append(Method({"way": f"checkpoint_sequential, {segments}"}, way))
    for budget in _numbers(arguments.min_cut):
        name = f"activation_memory_budget {budget:g}"
        methods.append(Method({"way": name}, min_cut(workload, budget)))
    return methods


def _planned(comparison: Comparison, arguments: argparse.Namespace) -> list[Method]:
    """Return tightfit at every ratio for which there is a plan, planned with in-step costs."""
    methods: list[Method] = []
    ratios = _numbers(arguments.ratios)
    session = comparison.within(comparison.budget_of(max(ratios)))
    step = PlannedStep(session)
    comparison.workload.reset()
    step_time(comparison.workload, step)
    while session.is_tuning:
        step_time(comparison.workload, step)
    for ratio in ratios:
        budget_bytes = comparison.budget_of(ratio)
        row: dict[str, Any] = {"way": f"tightfit {ratio:g}", "budget_ratio": ratio}
        comparison.within(budget_bytes)
        try:
            step_time(comparison.workload, step)
            let_search_end()
            step_time(comparison.workload, step)
        except InfeasibleBudget as error:
            row["error"] = str(error)
        else:
            session.close_step()
            report = session.report()
            row |= {
                "budget_bytes": budget_bytes,
                "constant_bytes": report.constant_bytes,
                "planned_peak_bytes": report.planned_peak_bytes,
                "overhead": report.overhead,
                "bound": report.bound,
                "status": report.status,
            }
        methods.append(
            Method(
                row,
                step,
                enter=lambda budget_bytes=budget_bytes: session.change_budget(budget_bytes),
                leave=session.close_step,
            )
        )
    return methods


def _check(method: Method, workload: Workload) -> None:
    """Note peak, equality with plain PyTorch after one step, or the error."""
    if "error" in method.row:
        return
    args, kwargs = workload.args, workload.kwargs

    def step(function: LossFunction) -> Any:
        return measure_peak(lambda: function(*args, **kwargs).backward(), device=workload.device)[1]

    workload.reset()
    torch.manual_seed(workload.seed)
    try:
        method.run(step)
        digests = workload.digests()
        workload.model.zero_grad(set_to_none=True)
        gc.collect()
        method.row["peak_bytes"] = method.run(step).peak_bytes
    except RuntimeError as error:
        method.row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return
    workload.reset()
    torch.manual_seed(workload.seed)
    workload.loss_of(*args, **kwargs).backward()
    expected = workload.digests()
    method.row["bitwise"] = digests == expected


def time_interleaved(
    methods: list[Method],
    workload: Workload,
    rounds: int,
    progress: Progress,
) -> None:
    """Time all methods in rounds, the order alternating.

    Every timed step follows one of the same method, so that it finds the heap as its own steps
    leave it, not as another method's. With another budget a better plan is searched again.
    """
    progress.start("rounds", rounds)
    for index in range(rounds):
        for method in methods if index % 2 == 0 else methods[::-1]:
            method.run(lambda function: step_time(workload, function))
            let_search_end()
            seconds = method.run(lambda function: step_time(workload, function))
            method.times.append(seconds)
        progress.update(index + 1)
    progress.stop()


def let_search_end(longest_s: float = _LONGEST_SEARCH_S) -> None:
    """Wait until no better plan is searched: its processor time is not the steps'."""
    deadline = time.monotonic() + longest_s
    while time.monotonic() < deadline and searching():
        time.sleep(0.05)


def measured(method: Method, eager: Method) -> dict[str, Any]:
    """Return an method's peak and time as shares of plain PyTorch's."""
    if "error" in method.row:
        return {}
    ratios = sorted(own / plain for own, plain in zip(method.times, eager.times, strict=True))
    return {
        "ratio": method.row["peak_bytes"] / eager.row["peak_bytes"],
        "time_ratio": statistics.median(ratios),
        "time_ratios": [round(ratio, 4) for ratio in ratios],
        "step_s": statistics.median(method.times),
    }


def circumstances(threads: int, rounds: int, device: str = "cpu") -> dict[str, Any]:
    """Return when and on what a benchmark runs."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "device": device_name(device),
        "threads": threads,
        "rounds": rounds,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }


def device_name(name: str) -> str:
    """Return what a device is."""
    if name == "cuda":
        return f"cuda, {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return f"cpu, {_processor()}, {os.cpu_count()} cores"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['way']:32} {row['error'][:120]}"
    return (
        f"{row['way']:32} peak {row['peak_bytes'] / 2**20:8.1f} MiB ratio {row['ratio']:.3f} "
        f"time {row['time_ratio']:.3f} bitwise {row['bitwise']}"
        + (f" overhead {row['overhead']:.3f} bound {row['bound']:.3f}" if "bound" in row else "")
    )


if __name__ == "__main__":
    main()
