"""Fuzzing: random models at random budgets must be bitwise equal, inside, and as predicted.

    nice python benchmarks/fuzz.py --cases 3000
    nice python benchmarks/fuzz.py --lives --cases 1000

For each model of `random_models` the least budget is found, then `BUDGETS` budgets are drawn
between it and the eager peak, one of them within 5 % of the least, and training there is compared
with plain PyTorch. One line for each case that failed or was refused, and a summary for every
`CHUNK` seeds, go to ``benchmarks/results/fuzz.jsonl``; a run that was stopped goes on after the
last summary.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import io
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.random_models import random_example
from benchmarks.rows import append_rows, read_rows
from benchmarks.training_loops import Life, Run, live
from tightfit.errors import CaptureError, NothingToTrain, TightfitError
from tightfit.planners.base import Limits
from tightfit.studies.comparison import Comparison
from tightfit.studies.proof import Proof

RESULTS = Path(__file__).parent / "results" / "fuzz.jsonl"
LIVES = Path(__file__).parent / "results" / "fuzz_lives.jsonl"
LIFE_STEPS = 4
BUDGETS = 3
CHUNK = 50
_LOSS_GRADIENT_BYTES = 64  # planned the whole step; a peak in the forward is reached without it
_LIMITS = Limits(seconds=1.0, gap=0.1)


def cases(seed: int) -> Iterator[dict[str, Any]]:
    """Yield one record for each budget of the model of a seed.

    ``outcome`` is ``"equal"``, ``"refused"``, ``"nothing to train"`` (such a model is no case),
    or what failed: ``"unequal"``, ``"over budget"``, ``"mispredicted"``, ``"error"``.
    """
    comparison, outcome = _comparison(seed)
    if comparison is None:
        for _ in range(BUDGETS if outcome["outcome"] == "refused" else 1):
            yield {"seed": seed, **outcome}
        return
    for share, budget_bytes in _budgets(seed, comparison):
        yield {"seed": seed, "share": share, **case(comparison, budget_bytes)}


def _comparison(seed: int) -> tuple[Comparison | None, dict[str, Any]]:
    """Return the comparison of a seed's model with plain PyTorch, or why there is none."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            comparison = Comparison(
                random_example(seed), steps=2, costs="unit", cache=False, limits=_LIMITS
            )
            comparison.smallest_budget()
    except NothingToTrain:
        return None, {"outcome": "nothing to train"}
    except CaptureError as error:
        return None, {"outcome": "refused", "message": str(error)}
    except TightfitError as error:
        return None, {"outcome": "error", "message": f"{type(error).__name__}: {error}"}
    return comparison, {}


def _budgets(seed: int, comparison: Comparison) -> list[tuple[float, int]]:
    """Return shares of the range between the least budget and eager's peak, and the budgets."""
    draw = random.Random(seed)
    least = comparison.smallest_budget().found_bytes
    span = max(0, comparison.eager.peak_bytes - least)
    shares = [draw.uniform(0, 0.05), *(draw.random() for _ in range(BUDGETS - 1))]
    return [(round(share, 4), least + int(share * span)) for share in shares]


def case(comparison: Comparison, budget_bytes: int) -> dict[str, Any]:
    """Return what happened within one budget."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            proof = comparison.at(budget_bytes, rounds=0)
    except TightfitError as error:
        return {"outcome": "error", "message": f"{type(error).__name__}: {error}"}
    if not proof.bitwise:
        return {"outcome": "unequal", "message": ", ".join(proof.differing[:5])}
    if not proof.holds:
        return {"outcome": "over budget", "message": _excess(proof)}
    spared = proof.planned_peak_bytes - proof.measured_program_bytes
    if spared not in (0, _LOSS_GRADIENT_BYTES):
        return {"outcome": "mispredicted", "message": f"{-spared} bytes more than planned"}
    return {"outcome": "equal"}


def lives(seed: int) -> Iterator[dict[str, Any]]:
    """Yield one record of the whole life of a seed's model within one budget.

    ``outcome`` is as in `cases`; ``"over budget"`` if at any instant from `fit` on more bytes were
    allocated than the budget has.
    """
    comparison, outcome = _comparison(seed)
    if comparison is None:
        yield {"seed": seed, **outcome}
        return
    share, budget_bytes = _budgets(seed, comparison)[seed % BUDGETS]
    del comparison
    gc.collect()

    def train(run: Run) -> None:
        model, _, args, _ = random_example(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        run.fit(model, optimizer=optimizer)
        for _ in range(run.steps):
            loss = model(*args)
            run.step(loss, optimizer)
            del loss
        run.trained(model)

    with contextlib.redirect_stderr(io.StringIO()):
        plain = live(train, Run(None, steps=LIFE_STEPS, small=True))
        how = {"costs": "unit", "cache": False, "limits": _LIMITS}
        fitted = live(train, Run(budget_bytes, steps=LIFE_STEPS, small=True, **how))
    yield {"seed": seed, "share": share, "budget": budget_bytes, **_life(plain, fitted)}


def _life(plain: Life, fitted: Life) -> dict[str, Any]:
    """Return what happened in a whole life."""
    assert fitted.budget_bytes is not None
    over = [peak / fitted.budget_bytes for peak in fitted.peaks_bytes]
    steps = {"steps": [round(ratio, 4) for ratio in over]}
    if fitted.largest_bytes > fitted.budget_bytes:
        return {"outcome": "over budget", "message": fitted.error, **steps}
    if fitted.error:
        return {"outcome": "error", "message": fitted.error, **steps}
    if (plain.losses, plain.parameters) != (fitted.losses, fitted.parameters):
        return {"outcome": "unequal", **steps}
    return {"outcome": "equal"}


def _excess(proof: Proof) -> str:
    program = f"{proof.measured_program_bytes} of {proof.planned_peak_bytes} planned"
    return f"{proof.measured_peak_bytes} bytes in {proof.budget_bytes}; program {program}"


def main() -> None:
    """Run the cases asked for; write failures and summaries as soon as they are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--lives", action="store_true", help="whole lives, first step included")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # proofs collect garbage before every step; what was imported is none
    ends = time.monotonic() + options.seconds
    results, records = (LIVES, lives) if options.lives else (RESULTS, cases)
    seed, total = _recorded(results)
    while sum(total.values()) < options.cases and time.monotonic() < ends:
        total += _run_chunk(seed, records, results)
        seed += CHUNK
        print(f"seeds up to {seed - 1}: {dict(total)}", flush=True)


def _recorded(results: Path) -> tuple[int, Counter[str]]:
    """Return the first seed that was not run yet, and the outcomes of those before it."""
    summaries = [row for row in read_rows(results) if "seeds" in row]
    total: Counter[str] = Counter()
    for row in summaries:
        total += Counter(row["outcomes"])
    return max((row["seeds"][1] + 1 for row in summaries), default=0), total


def _run_chunk(
    first: int, records: Callable[[int], Iterator[dict[str, Any]]], results: Path
) -> Counter[str]:
    """Run `CHUNK` seeds; append what failed and a summary to the log."""
    began = time.monotonic()
    counts: Counter[str] = Counter()
    found = []
    for seed in range(first, first + CHUNK):
        for record in records(seed):
            if record["outcome"] == "nothing to train":
                continue
            counts[record["outcome"]] += 1
            if record["outcome"] != "equal":
                found.append(record)
                print(record, flush=True)
    summary = {
        "seeds": [first, first + CHUNK - 1],
        "cases": sum(counts.values()),
        "outcomes": dict(counts),
        "seconds": round(time.monotonic() - began),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "torch": torch.__version__,
    }
    append_rows(results, *found, summary)
    return counts


if __name__ == "__main__":
    main()
