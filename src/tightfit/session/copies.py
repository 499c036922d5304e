"""Deep copies of a fitted model: its budget was given once, for all of them together."""

from __future__ import annotations

import weakref
from typing import Protocol

from tightfit.allocator.tally import Tally
from tightfit.session.memory.account import Account
from tightfit.session.memory.budget import Budget


class Original(Protocol):
    """The fitted callable of a model that is copied."""

    account: Account

    @property
    def is_used(self) -> bool:
        """Whether it has trained."""

    def share(self, budget: Budget) -> None:
        """Share a budget with others from now on."""


class Copies:
    """State that a fitted model and its deep copies have in common.

    A copy that trains shares the budget of the model. A copy that does not train, such as averaged
    weights or a teacher, counts as other memory; so does a model of which only copies train. Bytes
    are counted from the time when the model was fitted.

    `original`: not kept alive.
    """

    def __init__(self, original: Original) -> None:
        self._original = weakref.ref(original)
        self._tally = original.account.tally
        self._budget: Budget | None = None

    @property
    def tally(self) -> Tally | None:
        """What counts the bytes allocated since the model was fitted."""
        original = self._original()
        return self._tally if original is None else original.account.tally

    def budget(self, size_bytes: int) -> Budget:
        """Return the budget of all, shared from now on: a copy begins to train.

        `size_bytes`: the budget that the model was fitted with.
        """
        if self._budget is None:
            self._budget = Budget(size_bytes)
            original = self._original()
            if original is not None:
                original.account.expect_training(original.is_used)
                original.share(self._budget)
        return self._budget
