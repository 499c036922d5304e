"""Training loops at a small size: the bits of plain PyTorch, within the budget at every instant."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import loops_table
from benchmarks.loops import compared, fitted_row
from benchmarks.loops_table import document
from benchmarks.rows import read_rows
from benchmarks.training_loops import LOOPS, Life, Run, live

TIGHT: tuple[str, ...] = ()
"""Loops that keep within 0.6 of plain PyTorch's peak, or within the least that is advised."""

ROOMY = (
    "gan",
    "gan_one_budget",
    "diffusion",
    "state_in_an_argument",
    "vector_quantised",
    "detector",
    "mixture_of_experts",
    "proximal_policy",
    "limited_memory",
    "state_space",
    "evaluation_between_steps",
    "trainer",
    "logits_held",
    "two_views",
)
"""Loops that give the bits of plain PyTorch within a budget that does not bind."""

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4
HOW = {"costs": "unit", "cache": False, "limits": (0.2, 0.1)}


def lives_of(name: str) -> tuple[Life, Callable[[int], Life]]:
    """Return the life of a plain loop, and what gives that of one within a budget."""
    loop = LOOPS[name]
    for package in loop.packages:
        pytest.importorskip(package)

    def within(budget_bytes: int) -> Life:
        return live(loop.function, Run(budget_bytes, steps=STEPS, small=True, **HOW))

    return live(loop.function, Run(None, steps=STEPS, small=True)), within


@pytest.mark.parametrize("name", ROOMY)
def test_a_budget_that_does_not_bind_changes_no_bit(name: str) -> None:
    plain, within = lives_of(name)
    row = compared(plain, within(1 << 26))
    assert not row["error"] and row["losses_equal"] and row["parameters_equal"], row
    assert row["over_budget"] <= 1, row


@pytest.mark.parametrize("name", TIGHT)
def test_a_budget_holds_from_fit_to_the_end(name: str) -> None:
    row = fitted_row(*lives_of(name))
    assert not row["error"] and row["losses_equal"] and row["parameters_equal"], row
    assert row["over_budget"] <= 1, row


def test_the_page_tells_of_the_newest_rows() -> None:
    plain = Life(None, 100, 10, (100, 90, 90), (0.1, 0.1), ("0x1p+1",), "same")
    fitted = Life(80, 0, 10, (90, 80, 70), (2.0, 0.2), ("0x1p+1",), "same")
    row = {"loop": "gan", "small": False, "budget": "0.6 of plain", "plain_peak_bytes": 100}
    row |= {"device": "cpu", "threads": 1, "torch": "2.13", "steps": 2, "load": 0.5, "commit": "c"}
    row |= compared(plain, fitted)
    text = document([{**row, "steps_over": [1, 2, 3, 5]}, row, {**row, "small": True}])
    (line,) = [text for text in text.splitlines() if "A GAN" in text]
    assert line.split(" | ")[2:] == [
        "0.80",
        "1.125",
        "1",
        "equal",
        "2.0 / 0.1 s",
        "0.2 / 0.1 s",
        " |",
    ]


def test_the_committed_page_is_that_of_the_committed_rows() -> None:
    rows = read_rows(loops_table.ROWS)
    assert loops_table.TABLE.read_text() == document(rows)
