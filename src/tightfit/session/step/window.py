"""Which planned calls await their backward at once: seen in earlier steps, expected in this
step."""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeAlias

from tightfit.session.step.ledger import CallKind

_REMEMBERED = 16

Together: TypeAlias = tuple[Any, ...]
"""Kinds of calls that awaited their backward at the same time, in their order."""


class Awaited(Protocol):
    """A call that may await its backward."""

    @property
    def is_open(self) -> bool:
        """Whether its backward is still to come or running."""

    @property
    def is_freed(self) -> bool:
        """Whether its saved tensors were freed before its backward."""


class Window(Generic[CallKind]):
    """The current step: from its first planned call until no backward is awaited any more.

    All callables within a budget have the same. Which calls it will have is unknown: they are
    predicted from earlier steps, as far as they began like this step.

    `left_bytes`: given out in the process when the last forward ended; None: not known.
    """

    def __init__(self) -> None:
        self.left_bytes: int | None = None
        self._calls: list[tuple[weakref.ref[Any], CallKind]] = []
        self._combinations: set[Together] = set()
        self._is_noted = False
        self._steps: deque[frozenset[Together]] = deque(maxlen=_REMEMBERED)
        self._known: tuple[frozenset[Together], ...] = ()  # of them, each once: most are alike

    @property
    def open(self) -> list[CallKind]:
        """The kinds of the calls that await their backward, in the order of their forwards."""
        calls = self._calls
        return [k for call, k in calls if (run := call()) is not None and run.is_open]

    @property
    def waiting(self) -> list[tuple[Awaited, CallKind]]:
        """The calls that await their backward with their kinds, in the order of their forwards."""
        calls = self._calls
        return [(run, k) for call, k in calls if (run := call()) is not None and run.is_open]

    def begins(self, kind: CallKind, call: Awaited) -> bool:
        """Note a call; return whether others await their backward."""
        together = (*self.open, kind)
        if len(together) == 1:
            self._calls, self._combinations, self._is_noted = [], set(), False
        self._calls = [known for known in self._calls if known[0]() is not None]
        self._calls.append((weakref.ref(call), kind))
        if not _begin_so(self._combinations, together):
            self._combinations = {*self._combinations, together} - {together[:-1]}
        return len(together) > 1

    def leaves(self, live_bytes: int | None) -> None:
        """Note how much is given out in the process at the end of a forward."""
        self.left_bytes = live_bytes

    def ended(self) -> None:
        """Note that a backward has ended; with the last the step is known."""
        if self._combinations and not self._is_noted and not self.open:
            self._note(frozenset(self._combinations))
            self._is_noted = True

    def _note(self, met: frozenset[Together]) -> None:
        if len(self._steps) == _REMEMBERED and self._known == (met,):
            return  # as all that are remembered
        self._steps.append(met)
        self._known = tuple(dict.fromkeys(self._steps))

    def forget(self) -> None:
        """Expect nothing any more: other callables take part from now on."""
        self._steps.clear()
        self._known = ()

    @property
    def has_closed(self) -> bool:
        """Whether any step is known."""
        return bool(self._known)

    @property
    def was_alone(self) -> bool:
        """Whether no call of the last step has awaited its backward along with another."""
        return max(map(len, self._combinations), default=1) == 1

    def has_only(self, kind: CallKind) -> bool:
        """Whether no call awaits its backward, and all steps known had one such call, no other."""
        return self._known == (frozenset({(kind,)}),) and not self.open

    def knows(self, kind: CallKind) -> bool:
        """Whether such a call was seen after those that await their backward now."""
        together = (*self.open, kind)
        return any(_begin_so(met, together) for met in self._known)

    def to_come(
        self, kind: CallKind, alike: Callable[[CallKind, CallKind], bool] = operator.eq
    ) -> Sequence[CallKind]:
        """Return the most calls that may follow a call before the backward of those open now.

        `alike`: whether a successor of one kind is expected after another.
        """
        together = (*self.open, kind)
        found = (each for met in self._known for each in _begin_so(met, together, alike))
        return max(found, key=len, default=together)[len(together) :]


def _begin_so(
    met: Iterable[Together], together: Together, alike: Callable[[Any, Any], bool] = operator.eq
) -> list[Together]:
    return [each for each in met if len(each) >= len(together) and all(map(alike, each, together))]
