"""A recorded step as a graph for the planners, whose order is the program's.

Beside the operators there are ops without cost for what else decides how long bytes are held:
what cannot be computed again, or stays for another reason, lasts until the program lets go of it;
and what lies beside all this shrinks while the step goes on.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from msgspec.structs import replace

from tightfit.dynamic.learned.trace import Made, Trace
from tightfit.graph.ir import Alternative, Device, Graph, Op, Value, Variant
from tightfit.graph.validate import validate_graph

__all__ = ["GUIDED_S", "RecordedGraph", "graph_of"]

GUIDED_S = 2e-5
"""What the runtime itself spends on an operator, whether it runs first or again."""

_DEVICE = Device(kind="cpu", granularity_bytes=64)
_FALLS = 64  # steps in which what lies beside shrinks, at most


@dataclass(frozen=True)
class RecordedGraph:
    """A graph, and where its ops and values are in the trace.

    Parameters
    ----------
    graph : Graph
        Its ops stand in the order in which the program runs.
    operators : tuple of int
        Per op the operator's position in the trace; -1 for what is no operator.
    contents : tuple of int
        Per value the number of its content; -1 for what is none.
    """

    graph: Graph
    operators: tuple[int, ...]
    contents: tuple[int, ...]


def graph_of(trace: Trace, *, in_place: bool) -> RecordedGraph:
    """Return a recorded step as a graph; what cannot be evicted counts as constants.

    Parameters
    ----------
    trace : Trace
        The step.
    in_place : bool
        Whether an operator that writes over a content always does so. False: a plan may also have
        it write elsewhere, which planners find easier, and which the program does not do; such a
        plan can be followed if it frees what was written over at once.
    """
    return _Builder(trace, in_place).build()


@dataclass
class _Events:
    """What happens between two operators."""

    ended: list[int] = field(default_factory=list)
    shrunk: list[int] = field(default_factory=list)


class _Builder:
    """Puts a graph together.

    Parameters
    ----------
    trace, in_place
        As for `graph_of`.
    """

    def __init__(self, trace: Trace, in_place: bool) -> None:
        self.trace = trace
        self.in_place = in_place
        self.values: list[Value] = []
        self.contents: list[int] = []
        self.ops: list[Op] = []
        self.operators: list[int] = []
        self.value_of: dict[int, int] = {}  # of contents that may be evicted, or come and go
        self.stays: set[int] = set()  # values that nobody can compute again, or that settled
        self.events: dict[int, _Events] = defaultdict(_Events)
        self.returned: set[int] = set()
        self.settled = {number for _, number in trace.settled}

    def build(self) -> RecordedGraph:
        """Return the graph."""
        trace = self.trace
        constant_bytes = self._beside()
        for number, end in enumerate(trace.ends):
            self.events[end].ended.append(number)
        for position in range(len(trace.asked)):
            self._between(position)
            self._operator(position)
        self._between(len(trace.asked))
        carried = (met.size_bytes for met in trace.met if met.repeats)
        constants = {"beside": constant_bytes, "carried": sum(map(_DEVICE.rounded, carried))}
        values = tuple(
            Value(
                id=n,
                name=value.name,
                size_bytes=value.size_bytes,
                fate="returned" if n in self.returned else "none",
            )
            for n, value in enumerate(self.values)
        )
        graph = Graph(
            values=values,
            ops=tuple(self.ops),
            constants_bytes=constants,
            device=_DEVICE,
            cost_source="recorded",
            name="recorded step",
        )
        return RecordedGraph(validate_graph(graph), tuple(self.operators), tuple(self.contents))

    # -- what lies beside ------------------------------------------------------------------------

    def _beside(self) -> int:
        """Add what is there in the beginning and ends; return what is there to the end."""
        samples = self.trace.beside_bytes
        if not samples:
            return 0
        until, level_bytes = samples[-1]
        slack_bytes = (max(size for _, size in samples) - level_bytes) // _FALLS
        constant_bytes = level_bytes + slack_bytes
        falls: list[tuple[int, int]] = []  # from where on bytes are there no longer
        for position, size_bytes in reversed(samples):
            if size_bytes - level_bytes > slack_bytes:
                falls.append((until, size_bytes - level_bytes))
                level_bytes = size_bytes
            until = position
        if falls:
            made = [self._value(f"beside {n}", size, -1) for n, (_, size) in enumerate(falls)]
            self._event("begins", writes=tuple(made))
            for value, (position, _) in zip(made, falls, strict=True):
                self.events[position].shrunk.append(value)
        return constant_bytes

    # -- between operators -----------------------------------------------------------------------

    def _between(self, position: int) -> None:
        events = self.events[position]
        for value in events.shrunk:
            self._event("shrinks", reads=(value,))
        for number in events.ended:
            value = self.value_of.get(number)
            if value is None or value not in self.stays:
                continue
            if position < len(self.trace.asked):
                self._event("ends", reads=(value,))
            else:
                self.returned.add(value)

    def _event(self, name: str, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()) -> None:
        way = Alternative(reads=reads, writes=writes)
        op = Op(id=len(self.ops), target=name, alternatives=(way,), pinned="it happens once")
        self.ops.append(op)
        self.operators.append(-1)

    # -- operators -------------------------------------------------------------------------------

    def _operator(self, position: int) -> None:
        trace = self.trace
        asked = trace.asked[position]
        reads = self._values_of(asked.reads)
        taken: list[tuple[int, int]] = []  # a value whose storage another one takes over
        writes: list[int] = []
        can_repeat: list[bool] = []
        for made in trace.made[position]:
            old = self.value_of.get(made.over)
            if made.over >= 0 and (old is None or old in self.stays) and not made.repeats:
                if old is not None:
                    self.value_of[made.number] = old  # the same bytes, which nobody can evict
                continue
            value = self._made(made)
            writes.append(value)
            can_repeat.append(value not in self.stays)
            if old is not None and self._size(old) == self._size(value):
                taken.append((self._size(value), len(writes) - 1))
        variant = Variant(
            cost_s=trace.cost_ns[position] * 1e-9 + GUIDED_S,
            workspace_bytes=trace.workspace_bytes[position],
        )
        made = tuple(writes)
        ways = [Alternative(reads=reads, writes=made, variants=(variant,))]
        if taken:
            ways = self._written_over(position, ways[0], max(taken)[1])
        self.ops.append(
            Op(
                id=len(self.ops),
                target=str(asked.function),
                alternatives=tuple(ways),
                pinned=None if any(can_repeat) and all(can_repeat) else "it cannot run again",
            )
        )
        self.operators.append(position)

    def _made(self, made: Made) -> int:
        value = self._value(f"content {made.number}", made.size_bytes, made.number)
        self.value_of[made.number] = value
        if not made.repeats or made.number in self.settled:
            self.stays.add(value)
        return value

    def _written_over(self, position: int, way: Alternative, first: int) -> list[Alternative]:
        """Return the ways of an operator that takes the storage of a content for one it makes."""
        made, old = way.writes, self._overwritten(position, way.writes[first])
        over = replace(
            way,
            name="in place",
            reads=tuple(dict.fromkeys((*way.reads, old))),
            writes=(made[first], *made[:first], *made[first + 1 :]),
            overwrites=old,
            use="first",
        )
        return [over, replace(way, use="again")] if self.in_place else [way, over]

    def _overwritten(self, position: int, value: int) -> int:
        """The value whose storage a new one took."""
        number = self.contents[value]
        over = next(m.over for m in self.trace.made[position] if m.number == number)
        return self.value_of[over]

    def _values_of(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        found = (self.value_of.get(number) for number in numbers)
        return tuple(dict.fromkeys(value for value in found if value is not None))

    def _value(self, name: str, size_bytes: int, number: int) -> int:
        size_bytes = _DEVICE.rounded(size_bytes)
        self.values.append(Value(id=len(self.values), name=name, size_bytes=size_bytes))
        self.contents.append(number)
        return len(self.values) - 1

    def _size(self, value: int) -> int:
        return self.values[value].size_bytes
