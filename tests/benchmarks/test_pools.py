"""The committed pages about pools and about the allocator hook are those of their rows."""

from __future__ import annotations

import json

import pytest

from benchmarks import arena_fuzz, hook_cost, pools
from benchmarks.rows import BenchmarkPage


@pytest.mark.parametrize(
    "page", [pools.BENCHMARK_PAGE, hook_cost.BENCHMARK_PAGE], ids=["pools", "hook_cost"]
)
def test_the_committed_page_is_that_of_the_committed_rows(page: BenchmarkPage) -> None:
    assert page.page.read_text("utf-8") == page.document(page.read())


def test_an_arena_holds_less_than_the_stock_pool() -> None:
    rows = [row for row in pools.BENCHMARK_PAGE.read() if row["kind"] == "fixed"]
    held = {(row["model"], row["phase"], row["way"]): row["held_bytes"] for row in rows}
    for model in pools.BATCHES:
        stock = held[model, "training", "stock pool"]
        assert held[model, "training", "arena"] <= 1.02 * stock


def test_random_models_have_the_bits_of_plain_pytorch_in_a_poisoned_arena() -> None:
    summary = json.loads(arena_fuzz.RESULTS.read_text("utf-8").splitlines()[-1])
    assert summary["cases"] >= 1000 and set(summary["outcomes"]) == {"equal"}
    assert all(arena_fuzz.outcome_of(seed)[0] == "equal" for seed in range(5))
