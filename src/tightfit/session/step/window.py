"""Predicts from earlier steps which planned calls will await their backward at the same time."""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeAlias

from tightfit.session.step.ledger import CallKind

_REMEMBERED = 16  # steps

OpenKinds: TypeAlias = tuple[Any, ...]
"""Kinds of calls that awaited their backward at the same time, in the order of their forwards."""


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

    All callables within a budget share it. Its calls are predicted from earlier steps that began
    alike.

    `forward_end_bytes`: live bytes of the process when the last forward ended; None: not known.
    """

    def __init__(self) -> None:
        self.forward_end_bytes: int | None = None
        self._calls: list[tuple[weakref.ref[Any], CallKind]] = []
        self._combinations: set[OpenKinds] = set()
        self._is_noted = False
        self._steps: deque[frozenset[OpenKinds]] = deque(maxlen=_REMEMBERED)
        self._known: tuple[frozenset[OpenKinds], ...] = ()  # of them, each once: most are alike

    @property
    def open(self) -> list[CallKind]:
        """The kinds of the calls that await their backward, in the order of their forwards."""
        return [kind for _, kind in self.waiting]

    @property
    def waiting(self) -> list[tuple[Awaited, CallKind]]:
        """The calls that await their backward with their kinds, in the order of their forwards."""
        calls = self._calls
        return [(run, k) for call, k in calls if (run := call()) is not None and run.is_open]

    def begins(self, kind: CallKind, call: Awaited) -> bool:
        """Note a call; return whether others await their backward."""
        kinds = (*self.open, kind)
        if len(kinds) == 1:
            self._calls, self._combinations, self._is_noted = [], set(), False
        self._calls = [known for known in self._calls if known[0]() is not None]
        self._calls.append((weakref.ref(call), kind))
        if not _starting_like(self._combinations, kinds):
            self._combinations = {*self._combinations, kinds} - {kinds[:-1]}
        return len(kinds) > 1

    def forward_ended(self, live_bytes: int | None) -> None:
        self.forward_end_bytes = live_bytes

    def backward_ended(self) -> None:
        """Note that a backward has ended; with the last the step ends."""
        if self._combinations and not self._is_noted and not self.open:
            self._note(frozenset(self._combinations))
            self._is_noted = True

    def _note(self, combinations: frozenset[OpenKinds]) -> None:
        if len(self._steps) == _REMEMBERED and self._known == (combinations,):
            return  # it is like all that are remembered
        self._steps.append(combinations)
        self._known = tuple(dict.fromkeys(self._steps))

    def forget(self) -> None:
        """Forget earlier steps: other callables take part from now on."""
        self._steps.clear()
        self._known = ()

    @property
    def has_history(self) -> bool:
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
        kinds = (*self.open, kind)
        return any(_starting_like(step, kinds) for step in self._known)

    def to_come(
        self, kind: CallKind, alike: Callable[[CallKind, CallKind], bool] = operator.eq
    ) -> Sequence[CallKind]:
        """Return the longest sequence of calls that may follow before the next backward.

        `alike`: whether the calls that followed one kind are expected after another.
        """
        kinds = (*self.open, kind)
        found = (each for step in self._known for each in _starting_like(step, kinds, alike))
        return max(found, key=len, default=kinds)[len(kinds) :]


def _starting_like(
    combinations: Iterable[OpenKinds],
    kinds: OpenKinds,
    alike: Callable[[Any, Any], bool] = operator.eq,
) -> list[OpenKinds]:
    return [
        each for each in combinations if len(each) >= len(kinds) and all(map(alike, each, kinds))
    ]
