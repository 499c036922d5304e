"""The history of steps that are alike, and the order in which parts run."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

from tightfit.planners.background import Search
from tightfit.progress import Progress
from tightfit.session.parts.choice import PartPlans
from tightfit.session.parts.kinds import Kind, Part, forget_oldest
from tightfit.session.step.edits import with_more
from tightfit.session.step.holding import Holding
from tightfit.session.step.ledger import StepLedger

_MOST_HISTORIES = 16


class StepHistory:
    """The history of steps with the same inputs that begin with about as much held.

    `held_bytes`: at the begin, with memory that will come and stay. `ledger`: the last such step of
    those in which most parts have run. `plans`: the plans of the parts; None while they are learned
    about. `planned`: the step that they are for: all parts run that may. `planned_bytes`: the peak
    that follows.
    """

    def __init__(self, signature: Any, held_bytes: int) -> None:
        self.signature = signature
        self.held_bytes = held_bytes
        self.ledger: StepLedger[Kind] | None = None
        self.plans: PartPlans | None = None
        self.planned: StepLedger[Kind] = StepLedger()
        self.planned_bytes = 0
        self.learned = 0
        self.lacked_room = False  # whether saved tensors were freed before their backward
        self._next_call = 0
        self._sizes: dict[_CallOfPart, _Sizes] = {}
        self._searches: list[Search[PartPlans | None]] = []
        weakref.finalize(self, _cancel, self._searches)  # not awaited when the model is gone

    def begin(self) -> None:
        self._next_call = 0

    def search(self, choose: Callable[[Progress], PartPlans | None]) -> None:
        """Begin to search better plans while training goes on with known plans."""
        _cancel(self._searches)
        self._searches.append(Search(choose))

    def ended_search(self) -> PartPlans | None:
        """Return the plans that a search has found if it has just ended; only once."""
        if not self._searches or not self._searches[0].is_done:
            return None
        return self._searches.pop().result()

    def ended(self, ledger: StepLedger[Kind]) -> None:
        """Note bytes held by such a step, unless a step is known in which more parts have run.

        To leave a call out of a measured step is more exact than to put a call in.
        """
        self.learned += 1
        for turn, kind in zip(_calls_of_parts(ledger), ledger.calls, strict=True):
            self._sizes[turn] = _seen(self._sizes.get(turn), kind)
        known = self.ledger
        if known is None or not self._knows(ledger) or len(ledger.calls) >= len(known.calls):
            self.ledger = ledger

    def with_varying(self, ledger: StepLedger[Kind]) -> StepLedger[Kind]:
        """Return a step whose calls of ever other sizes hold as much as plain PyTorch at most.

        Nothing is captured for them any more once they have had some more sizes, and then they run
        without plans.
        """
        more_bytes: list[int] = []
        for turn, kind in zip(_calls_of_parts(ledger), ledger.calls, strict=True):
            sizes = self._sizes.get(turn)
            most_bytes = sizes.most_bytes if sizes is not None and sizes.vary else 0
            more_bytes.append(max(0, most_bytes - kind.least.staying_bytes))
        return with_more(ledger, more_bytes)

    def checked(self, ledger: StepLedger[Kind]) -> None:
        """Note a step of which not every peak was seen; learn again if other parts have run."""
        if not self._knows(ledger):
            self.learned = 0

    def _knows(self, ledger: StepLedger[Kind]) -> bool:
        """Whether nothing has run in a step that did not run in the known step."""
        return self.ledger is not None and set(ledger.calls) <= set(self.ledger.calls)

    def plan(self, plans: PartPlans, planned: StepLedger[Kind]) -> None:
        """Run such steps by these plans from now on."""
        self.plans, self.planned = plans, planned
        self.planned_bytes = planned.peak_of(plans.calls)

    def planned_holding(self, part: Part, kind: Kind) -> Holding | None:
        """Return the plan of the next call; None if the step was not planned to have it now."""
        if self.plans is None:
            return None
        parts, calls = self.planned.parts, self.planned.calls
        for turn in range(self._next_call, len(calls)):
            if (parts[turn], calls[turn]) == (part, kind):
                self._next_call = turn + 1
                return self.plans.calls[turn]
        return None

    def holds_as_planned(self, held_bytes: int, limit_bytes: int) -> bool:
        """Whether no more is held than was planned for the call of the last `planned_holding`.

        Bytes that code between the parts holds now and frees before their backward are counted in
        the measured step. So no more need be free than the plans leave.

        `held_bytes`: with memory that will come and stay. `limit_bytes`: of the whole step: other
        memory may use as much of it as the plans leave.
        """
        return self._unplanned_bytes(held_bytes) <= limit_bytes - self.planned_bytes

    def peak_from_here(self, held_bytes: int) -> int:
        """Return the peak if that call runs as planned, and later ones by least plans.

        What is held and was not planned for is expected to stay.
        """
        assert self.plans is not None
        later = (kind.least for kind in self.planned.calls[self._next_call :])
        peak_bytes = self.planned.peak_of([*self.plans.calls[: self._next_call], *later])
        return peak_bytes + self._unplanned_bytes(held_bytes)

    def _unplanned_bytes(self, held_bytes: int) -> int:
        assert self.plans is not None
        return held_bytes - self.planned.begin_of(self._next_call - 1, self.plans.calls)


class StepHistories:
    """Histories of steps by the signature of their inputs.

    Gradients that are accumulated and the optimizer's state make steps differ that have the same
    inputs.
    """

    def __init__(self) -> None:
        self._known: dict[Any, list[StepHistory]] = {}
        self._ended: dict[Any, None] = {}  # signatures of which a step was complete

    def note_end(self, signature: Any) -> None:
        """Note that a step with such inputs was complete."""
        self._ended[signature] = None
        forget_oldest(self._ended)

    def have_ended(self, signature: Any) -> bool:
        """Whether a step with such inputs was complete, however much it held at its begin."""
        return signature in self._ended

    def of(self, signature: Any, held_bytes: int, alike_bytes: int) -> StepHistory:
        """Return the history of steps that begin with as many bytes held; one begins now.

        `alike_bytes`: how much two steps may differ by at their begin and still be alike.
        """
        known = self._known.setdefault(signature, [])
        forget_oldest(self._known)
        near = [history for history in known if abs(history.held_bytes - held_bytes) <= alike_bytes]
        if near:
            found = min(near, key=lambda history: abs(history.held_bytes - held_bytes))
            found.begin()
            return found
        known.append(StepHistory(signature, held_bytes))
        del known[:-_MOST_HISTORIES]
        return known[-1]

    def keep(self, parts: Set[Part]) -> None:
        """Forget steps in which other parts have run."""
        for signature, known in [*self._known.items()]:
            kept = [
                history
                for history in known
                if history.ledger and parts.issuperset(history.ledger.parts)
            ]
            self._known[signature] = kept


class CallOrder:
    """The parts seen so far, each after the part that ran before it when it was first seen."""

    def __init__(self) -> None:
        self._parts: list[Part] = []

    def note(self, called: Sequence[Part]) -> None:
        """Learn from the parts that ran in a step: a new part comes after its predecessor."""
        place = 0
        for part in called:
            if part not in self._parts:
                self._parts.insert(place, part)
            place = self._parts.index(part) + 1

    def keep(self, parts: Set[Part]) -> None:
        """Forget other parts."""
        self._parts = [part for part in self._parts if part in parts]

    def order(self) -> dict[Part, int]:
        """Return each part's turn."""
        return {part: turn for turn, part in enumerate(self._parts)}


@dataclass(frozen=True)
class _Sizes:
    """The kinds that a call of a part was in the steps so far."""

    name: str  # of the first
    most_bytes: int  # that any keeps to its backward if nothing is recomputed
    vary: bool  # whether there was another


def _seen(known: _Sizes | None, kind: Kind) -> _Sizes:
    if known is None:
        return _Sizes(kind.name, kind.most.staying_bytes, vary=False)
    most_bytes = max(known.most_bytes, kind.most.staying_bytes)
    return _Sizes(known.name, most_bytes, vary=known.vary or kind.name != known.name)


_CallOfPart: TypeAlias = tuple[Part, int]
"""A part, and which of its calls in a step."""


def _calls_of_parts(ledger: StepLedger[Kind]) -> list[_CallOfPart]:
    before: Counter[Part] = Counter()
    turns: list[_CallOfPart] = []
    for part in ledger.parts:
        turns.append((part, before[part]))
        before[part] += 1
    return turns


def _cancel(searches: list[Search[PartPlans | None]]) -> None:
    for search in searches:
        search.cancel()
    searches.clear()
