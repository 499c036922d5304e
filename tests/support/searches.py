"""Searches for plans: those that go on while a model trains, and an interruption of others."""

from __future__ import annotations

from torch import nn

from tightfit.execution.attach import attached
from tightfit.progress import Silent


def wait_for_searches(model: nn.Module) -> None:
    """Wait until no better plan is searched: what is found is the same, but not the moment."""
    fitted = attached(model)
    for shape in () if fitted is None else fitted.specialisations:
        for search in shape.searches.values():
            search.wait()


class InterruptedAt(Silent):
    """A progress of a user who interrupts as soon as so many pieces of work are done."""

    def __init__(self, done: int) -> None:
        self._done = done

    def update(self, done: int, note: str = "") -> None:
        if done >= self._done:
            raise KeyboardInterrupt
