"""What a step that is planned part by part holds, mark by mark; and what it would hold otherwise.

Between the parts other code runs: eager modules, the loss, collectives with their buffers. What
that holds does not depend on the plans of the parts and is measured; what the parts hold follows
from their plans. So one measured step tells the peak under any other choice of plans.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from tightfit.execution.guard import Guard
from tightfit.graph.ir import Graph
from tightfit.plan.plan import Plan
from tightfit.plan.simulate import simulate

__all__ = ["Holding", "Ledger", "LedgerWriter", "Mark", "holding_of", "overhead_of"]

PartKind = TypeVar("PartKind")
Phase: TypeAlias = Literal["forward", "backward", "between"]


@dataclass(frozen=True, eq=False)
class Holding:
    """What a part holds under a plan, its constants left out.

    Parameters
    ----------
    plan : Plan
        The plan.
    saved_bytes : int
        From the end of its forward to the begin of its backward, outputs left out.
    output_bytes, tangent_bytes : int
        Its outputs and their gradients, which others hold too.
    forward_bytes : int
        Peak of its forward.
    rise_bytes : int
        Peak of its backward above what is held when that begins.
    cost_s, baseline_cost_s : float
        Its cost, and that with nothing recomputed.
    """

    plan: Plan
    saved_bytes: int
    output_bytes: int
    tangent_bytes: int
    forward_bytes: int
    rise_bytes: int
    cost_s: float
    baseline_cost_s: float

    @property
    def ends_bytes(self) -> int:
        """Its outputs and their gradients."""
        return self.output_bytes + self.tangent_bytes

    @property
    def staying_bytes(self) -> int:
        """What stays when its forward has ended."""
        return self.saved_bytes + self.output_bytes

    @property
    def peak_bytes(self) -> int:
        """The most it holds, its outputs included as long as anybody may."""
        return max(self.forward_bytes, self.rise_bytes + self.saved_bytes + self.ends_bytes)

    @property
    def needed_bytes(self) -> int:
        """The most on top of what is held when its forward begins: others drop its outputs."""
        return max(self.forward_bytes, self.rise_bytes + self.saved_bytes + self.tangent_bytes)


def holding_of(graph: Graph, plan: Plan) -> Holding:
    """Return what a plan of a part holds; the graph is without what lies around the part."""
    simulation = simulate(graph, plan)
    crossing, constant = simulation.crossing_index, graph.constant_bytes
    outputs = sum(value.size_bytes for value in graph.values if value.fate == "returned")
    tangents = sum(value.size_bytes for value in graph.values if value.role == "tangent")
    begin = simulation.after_bytes[crossing]
    return Holding(
        plan=plan,
        saved_bytes=max(0, begin - constant - outputs - tangents),
        output_bytes=outputs,
        tangent_bytes=tangents,
        forward_bytes=max(simulation.during_bytes[:crossing], default=constant) - constant,
        rise_bytes=max(simulation.during_bytes[crossing:]) - begin,
        cost_s=simulation.cost_s,
        baseline_cost_s=simulation.baseline_cost_s,
    )


def overhead_of(holdings: Sequence[Holding]) -> float:
    """Return what calls cost more than with nothing recomputed, a fraction."""
    least_s = sum(holding.baseline_cost_s for holding in holdings)
    return sum(holding.cost_s for holding in holdings) / least_s - 1 if least_s > 0 else 0.0


@dataclass(frozen=True)
class Mark:
    """One stretch of a step.

    Parameters
    ----------
    phase : str
        ``"forward"`` or ``"backward"`` of a call of a part, or ``"between"``.
    call : int
        Which call of a part, counted from the begin of the step; -1 between them.
    open : tuple of int
        The calls whose forward has ended and whose backward has not begun.
    begin_bytes, peak_bytes : int
        Held at its begin and at most, above the begin of the step.
    """

    phase: Phase
    call: int
    open: tuple[int, ...]
    begin_bytes: int
    peak_bytes: int


@dataclass
class Ledger(Generic[PartKind]):
    """A measured step.

    Parameters
    ----------
    calls : list
        The kind of part of each call, in order.
    holdings : list of Holding
        What each call held by its plan.
    marks : list of Mark
        The stretches of the step, in order.
    parts : list
        Which part each call was of.
    """

    calls: list[PartKind] = field(default_factory=list)
    holdings: list[Holding] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    parts: list[Any] = field(default_factory=list)

    @property
    def peak_bytes(self) -> int:
        """The most that was held, above the begin of the step."""
        return max((mark.peak_bytes for mark in self.marks), default=0)

    @property
    def beside_bytes(self) -> int:
        """The most that was held while no part held anything, the optimizer's step left out."""
        beside = (m.peak_bytes for m in self.marks[:-1] if m.phase == "between" and not m.open)
        return max(beside, default=0)

    def peak_with(self, chosen: Mapping[PartKind, Holding]) -> int:
        """Return the peak with other plans for the kinds of parts, above the begin of the step.

        Stretches in which no part holds anything, such as the optimizer's step, are left out.
        """
        calls = zip(self.calls, self.holdings, strict=True)
        return self.peak_of([chosen.get(kind, old) for kind, old in calls])

    def peak_of(self, new: Sequence[Holding]) -> int:
        """Return the peak with another plan for each call, above the begin of the step."""
        marks = [mark for mark in self.marks if mark.open or mark.phase != "between"]
        return max((self._peak(mark, new) for mark in marks), default=0)

    def begin_of(self, call: int, new: Sequence[Holding]) -> int:
        """Return what is held when a call's forward begins, with another plan for each call."""
        mark = next(m for m in self.marks if m.phase == "forward" and m.call == call)
        shift = sum(new[c].saved_bytes - self.holdings[c].saved_bytes for c in mark.open)
        return mark.begin_bytes + shift

    def room(self, kind: PartKind, saved_bytes: Mapping[PartKind, int], limit_bytes: int) -> int:
        """Return how much a kind of part may hold at its peak.

        Parameters
        ----------
        saved_bytes : mapping
            What each kind may hold from forward to backward.
        limit_bytes : int
            The limit of the step, above its begin.
        """
        room = limit_bytes
        for mark in self.marks:
            if mark.phase == "between" or self.calls[mark.call] != kind:
                continue
            others = sum(
                saved_bytes.get(self.calls[call], self.holdings[call].saved_bytes)
                - self.holdings[call].saved_bytes
                for call in mark.open
            )
            own = self.holdings[mark.call]
            left = limit_bytes - mark.begin_bytes - others - self._unforeseen(mark)
            if mark.phase == "backward":
                left += own.saved_bytes + own.ends_bytes
            room = min(room, left)
        return room

    def _peak(self, mark: Mark, new: Sequence[Holding]) -> int:
        """Return the peak of a stretch with other plans."""
        held = [*mark.open, mark.call] if mark.phase == "backward" else mark.open
        shift = sum(new[call].saved_bytes - self.holdings[call].saved_bytes for call in held)
        if mark.phase == "between":
            return mark.peak_bytes + shift
        own = new[mark.call]
        rise = own.forward_bytes if mark.phase == "forward" else own.rise_bytes
        return mark.begin_bytes + shift + rise + self._unforeseen(mark)

    def _unforeseen(self, mark: Mark) -> int:
        """Return how much more than planned a call of a part held."""
        own = self.holdings[mark.call]
        rise = own.forward_bytes if mark.phase == "forward" else own.rise_bytes
        return max(0, mark.peak_bytes - mark.begin_bytes - rise)


class LedgerWriter:
    """Writes the ledger of the step under way.

    Parameters
    ----------
    guard : Guard
        Measures the step, which has begun.
    """

    def __init__(self, guard: Guard) -> None:
        self.ledger: Ledger[Any] = Ledger()
        self._guard = guard
        self._open: list[int] = []
        self._stretch: tuple[Phase, int, tuple[int, ...], int] = ("between", -1, (), 0)
        self._backward_begun = False

    @property
    def is_complete(self) -> bool:
        """Whether every call of a part has had its backward."""
        return not self._open and self._stretch[0] == "between"

    def forward_begins(self, part: Any, kind: Any, holding: Holding) -> int:
        """Note a call of a part; return its number."""
        call = len(self.ledger.calls)
        self.ledger.parts.append(part)
        self.ledger.calls.append(kind)
        self.ledger.holdings.append(holding)
        self._turn("forward", call)
        return call

    def forward_ended(self, call: int) -> None:
        """Note that a call awaits its backward."""
        self._open.append(call)
        self._turn("between", -1)

    def backward_begins(self, call: int) -> None:
        """Note that a call's backward begins."""
        self._open.remove(call)
        self._turn("backward", call)
        if not self._backward_begun:
            self._backward_begun = True
            self._guard.before_backward()

    def backward_ended(self) -> None:
        """Note that the last gradient of a call was handed over."""
        self._turn("between", -1)
        if self.is_complete:
            self._guard.after_backward()

    def dropped(self, call: int) -> None:
        """Note that a call's backward will not come: nothing it returned is used any more."""
        if call in self._open:
            self._open.remove(call)
            if self._backward_begun and self.is_complete:
                self._guard.after_backward()

    def close(self) -> Ledger[Any]:
        """End the step; return its ledger."""
        self._turn("between", -1)
        return self.ledger

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Leave out what happens in the context: captures and measurements of operators."""
        self._turn("between", -1)
        with self._guard.paused():
            yield

    def _turn(self, phase: Phase, call: int) -> None:
        """End the stretch under way and begin another."""
        self.ledger.marks.append(Mark(*self._stretch, self._guard.take_peak()))
        self._stretch = (phase, call, tuple(self._open), self._guard.live_bytes())
