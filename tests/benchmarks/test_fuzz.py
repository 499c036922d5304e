"""Random models at random budgets: the same bits, inside the budget, as predicted."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

SEEDS = range(0, 130, 6)  # some 50 cases; benchmarks/fuzz.py runs thousands


@pytest.fixture(scope="module")
def fuzzing() -> Iterator[None]:
    """One thread, and no look at what was imported when a proof collects garbage."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("fuzzing")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_at_random_budgets(seed: int) -> None:
    from benchmarks.fuzz import cases

    for record in cases(seed):
        assert record["outcome"] in ("equal", "nothing to train"), record
