"""Random models in an arena whose memory is poisoned: the bits of plain PyTorch, whatever they do.

    nice python benchmarks/arena_fuzz.py --cases 1000

Each model of `random_models` takes a few steps plain and a few in an arena that fills every block
with NaNs when it is taken and when it is given back; in some steps an output is kept, one is left
without a backward, or the batch is another one, as the seed says. One line for each model that
failed, and a summary, go to ``benchmarks/results/arena_fuzz.jsonl``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tightfit
from benchmarks.random_models import random_example
from benchmarks.rows import Row, write_rows
from tightfit.allocator.replay import poisoned

__all__ = ["RESULTS", "outcome_of"]

RESULTS = Path(__file__).parent / "results" / "arena_fuzz.jsonl"
STEPS = 8


def trained(seed: int, arena: tightfit.Arena | None) -> list[Tensor]:
    """Take steps with the model of a seed; return losses, what was kept, and the state."""
    model, _, (x,), _ = random_example(seed)
    draw = random.Random(seed)
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters()) if list(model.parameters()) else None
    kept: list[Tensor] = []
    for _ in range(STEPS):
        chance = draw.random()
        given = torch.cat([x, x]) if chance < 0.1 else x
        loss = model(given)
        if loss.requires_grad and chance > 0.2:
            loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        kept.append(loss.detach() if chance > 0.5 else loss.detach().clone())
        del loss
        if arena is not None:
            arena.step()
    return [*kept, *model.state_dict().values()]


def outcome_of(seed: int) -> tuple[str, tightfit.ArenaReport | None]:
    """Say whether the model of a seed is the same in an arena, and what happened there."""
    try:
        plain = trained(seed, None)
    except RuntimeError as error:
        return f"plain PyTorch raises {type(error).__name__}", None
    with poisoned(), tightfit.arena() as arena:
        ours = trained(seed, arena)
    same = all(_same(a, b) for a, b in zip(ours, plain, strict=True))
    return "equal" if same else "unequal", arena.report


def _same(ours: Tensor, plain: Tensor) -> bool:
    """Whether two tensors have the same values, and NaNs at the same places."""
    places = torch.equal(ours.isnan(), plain.isnan())
    return places and torch.equal(ours.nan_to_num(), plain.nan_to_num())


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    cases = parser.parse_args().cases
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    rows: list[Row] = []
    started = time.process_time()
    for seed in range(cases):
        outcome, report = outcome_of(seed)
        outcomes[outcome] += 1
        if outcome == "unequal":
            rows.append({"seed": seed, "outcome": outcome})
        if report is not None:
            for name in ("steps", "exact_steps", "requests", "hits", "outside", "fallbacks"):
                sums[name] += getattr(report, name)
    seconds = round(time.process_time() - started, 1)
    summary = {"cases": cases, "outcomes": outcomes, "sums": sums, "seconds": seconds}
    write_rows(RESULTS, [*rows, summary])
    print(summary)


if __name__ == "__main__":
    main()
