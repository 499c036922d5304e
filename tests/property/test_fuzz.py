"""Random models at random budgets: the same bits, inside the budget, as predicted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

SEEDS = range(12)  # benchmarks/fuzz.py runs thousands


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_at_random_budgets(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from benchmarks.fuzz import cases

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for record in cases(seed):
            assert record["outcome"] in ("equal", "nothing to train"), record
    finally:
        torch.set_num_threads(threads)
