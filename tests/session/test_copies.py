"""A fitted model and its deep copies have one budget: made when the first copy trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tightfit.session.copies import Copies
from tightfit.session.memory.budget import Budget


class Original:
    """A fitted callable as far as copies know it."""

    def __init__(self, *, is_used: bool) -> None:
        self.is_used = is_used
        self.shared: list[Budget] = []
        self.expected: list[bool] = []
        expect: Any = self.expected.append
        self.account: Any = SimpleNamespace(tally=object(), expect_training=expect)

    def share(self, budget: Budget) -> None:
        self.shared.append(budget)


def test_the_budget_is_made_once_and_given_to_the_original_too():
    original = Original(is_used=True)
    copies = Copies(original)
    first, second = copies.budget(1000), copies.budget(2000)
    assert first is second and first.size_bytes == 1000
    assert original.shared == [first] and original.expected == [True]


def test_an_original_that_has_not_trained_is_held_and_no_more():
    original = Original(is_used=False)
    Copies(original).budget(1000)
    assert original.expected == [False]


def test_the_original_is_not_kept_alive_and_its_count_goes_on():
    original = Original(is_used=True)
    copies, tally = Copies(original), original.account.tally
    changed = original.account.tally = object()
    assert copies.tally is changed
    del original
    assert copies.tally is tally
    assert copies.budget(500).size_bytes == 500
