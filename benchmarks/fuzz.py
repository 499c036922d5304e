"""Fuzzing: random models at random budgets must be bitwise equal, inside, and as predicted.

    nice python benchmarks/fuzz.py --cases 3000

For each model of `random_models` the least budget is found, then `BUDGETS` budgets are drawn
between it and the eager peak, one of them within 5 % of the least, and training there is compared
with plain PyTorch. One line for each case that failed or was refused, and a summary of the whole
run, go to ``benchmarks/results/fuzz.jsonl``.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.random_models import random_example
from tightfit.api.prove import Comparison, Proof
from tightfit.errors import CaptureError, NothingToTrain, TightfitError
from tightfit.planners.base import Limits

RESULTS = Path(__file__).parent / "results" / "fuzz.jsonl"
BUDGETS = 3
_SLACK_BYTES = 16 << 10  # a plan counts the states of generators even where none is kept
_LIMITS = Limits(seconds=1.0, gap=0.1)


def cases(seed: int) -> Iterator[dict[str, Any]]:
    """Yield one record for each budget of the model of a seed.

    ``outcome`` is ``"equal"``, ``"refused"``, ``"nothing to train"`` (such a model is no case),
    or what failed: ``"unequal"``, ``"over budget"``, ``"mispredicted"``, ``"error"``.
    """
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            comparison = Comparison(
                random_example(seed), steps=2, costs="unit", cache=False, limits=_LIMITS
            )
            least = comparison.smallest_budget().found_bytes
    except NothingToTrain:
        yield {"seed": seed, "outcome": "nothing to train"}
        return
    except CaptureError as error:
        for _ in range(BUDGETS):
            yield {"seed": seed, "outcome": "refused", "message": str(error)}
        return
    except TightfitError as error:
        yield {"seed": seed, "outcome": "error", "message": f"{type(error).__name__}: {error}"}
        return
    draw = random.Random(seed)
    span = max(0, comparison.eager.peak_bytes - least)
    shares = [draw.uniform(0, 0.05), *(draw.random() for _ in range(BUDGETS - 1))]
    for share in shares:
        yield {"seed": seed, "share": round(share, 4), **case(comparison, least, span, share)}


def case(comparison: Comparison, least: int, span: int, share: float) -> dict[str, Any]:
    """Return what happened within one budget."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            proof = comparison.at(least + int(share * span), rounds=0)
    except TightfitError as error:
        return {"outcome": "error", "message": f"{type(error).__name__}: {error}"}
    if not proof.bitwise:
        return {"outcome": "unequal", "message": ", ".join(proof.differing[:5])}
    if not proof.holds:
        return {"outcome": "over budget", "message": _excess(proof)}
    wrong = abs(proof.measured_program_bytes - proof.planned_peak_bytes)
    if abs(proof.prediction_error) > 0.01 and wrong > _SLACK_BYTES:
        return {"outcome": "mispredicted", "message": f"{proof.prediction_error:+.4f}"}
    return {"outcome": "equal"}


def _excess(proof: Proof) -> str:
    program = f"{proof.measured_program_bytes} of {proof.planned_peak_bytes} planned"
    return f"{proof.measured_peak_bytes} bytes in {proof.budget_bytes}; program {program}"


def main() -> None:
    """Run the cases asked for; write failures at once and a summary at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    counts: Counter[str] = Counter()
    seed = options.seed
    with RESULTS.open("a") as file:
        while sum(counts.values()) < options.cases and time.monotonic() - began < options.seconds:
            for record in cases(seed):
                if record["outcome"] == "nothing to train":
                    continue
                counts[record["outcome"]] += 1
                if record["outcome"] != "equal":
                    file.write(json.dumps(record) + "\n")
                    print(record, flush=True)
            seed += 1
        summary = {
            "cases": sum(counts.values()),
            "outcomes": dict(counts),
            "seeds": [options.seed, seed - 1],
            "seconds": round(time.monotonic() - began),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "torch": torch.__version__,
        }
        file.write(json.dumps(summary) + "\n")
        print(summary)


if __name__ == "__main__":
    main()
