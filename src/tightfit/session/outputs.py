"""Which outputs of a call have never received a gradient, so that plans may do without."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tightfit.execution.runtime import Run

__all__ = ["Usage"]

_SURE = 3  # steps


class Usage:
    """What backwards have shown of the outputs of calls, by what tells calls apart.

    An output that has received a gradient once is planned with one ever after: two heads may be
    trained in turns.
    """

    def __init__(self) -> None:
        self._used: dict[Any, frozenset[int]] = {}
        self._unused: dict[Any, frozenset[int]] = {}
        self._steps: Counter[Any] = Counter()

    def note(self, key: Any, run: Run) -> None:
        """Note which outputs of a call receive a gradient, now that its backward has begun."""
        used = self._used[key] = self._used.get(key, frozenset()) | run.used
        self._unused[key] = (self._unused.get(key, frozenset()) | run.unused) - used

    def settled(self, key: Any) -> frozenset[int]:
        """Return the outputs to plan without a gradient, now that a step's backwards have begun.

        Those that were planned with one and have received none in this step and those before.
        """
        unused = self._unused.pop(key, frozenset())
        self._steps[key] += bool(unused)
        return unused if self._steps[key] >= _SURE else frozenset()
