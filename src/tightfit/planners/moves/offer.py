"""Moves as something that planning without far memory understands: one more way to compute again.

An op whose value may be moved gets another alternative for later computations: it reads nothing,
costs its *toll*, and writes the value as a load does. Two ops without cost read the value where its
store has ended and where its load should begin. So any planner of recomputation chooses for each
value among keeping, computing again and moving, and sees exactly the bytes that are near.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import MappingProxyType

import msgspec

from tightfit.graph.ir import Alternative, Graph, Op, OpId, Value, ValueId, Variant
from tightfit.graph.liveness import producers
from tightfit.plan.assemble import Step
from tightfit.plan.plan import Compute, Far, Free, Load, Store
from tightfit.planners.moves.gaps import Move
from tightfit.planners.orders.reorder import moved_choices

_MOST_TOGETHER = 3  # values of one op that may be loaded in one stage


@dataclass(frozen=True)
class MovesGraph:
    """A graph in which some values may be moved."""

    graph: Graph  # with two more ops for each move, and more alternatives
    base: Graph  # without them
    # For each op of `graph` that of `base`; None: it is a place of moves
    ops: tuple[OpId | None, ...]
    places: Mapping[OpId, OpId]  # for each op of `base` that of `graph`
    leaves: Mapping[OpId, ValueId]  # for ops of `graph` at whose place a value leaves: that value
    loads: Mapping[ValueId, Compute]  # the load of a value that is offered, and it alone

    def steps(self, computes: Iterable[Compute]) -> list[Step]:
        """Return computes of this graph as steps of the graph without moves."""
        steps: list[Step] = []
        for step in computes:
            op = self.ops[step.op]
            if op is None:
                steps += [Free(self.leaves[step.op])] if step.op in self.leaves else []
            elif step.alternative < len(self.base.ops[op].alternatives):
                steps.append(Compute(op, step.alternative, step.variant))
            else:
                steps += [Load(value) for value in step.alternative_in(self.graph).writes]
        return _with_stores(self.base, steps)

    def computes(self, steps: Iterable[Step]) -> list[Compute]:
        """Return steps of the graph without moves as computes of this graph.

        Values that are offered and not loaded there are loaded at their places; values that are
        loaded there and not offered are computed again.
        """
        steps = list(steps)
        loaded = {step.value for step in steps if isinstance(step, Load)}
        makers = producers(self.base)
        computes: list[Compute] = []
        seen: set[OpId] = set()
        for step in steps:
            if isinstance(step, Load):
                load = Compute(self.places[makers[step.value]])
                computes.append(self.loads.get(step.value, load))
            elif isinstance(step, Compute):
                position = self.places[step.op]
                if step.op not in seen:
                    seen.add(step.op)
                    computes += self._before(position, loaded)
                computes.append(Compute(position, step.alternative, step.variant))
        return computes

    def _before(self, position: OpId, loaded: Collection[ValueId]) -> Iterator[Compute]:
        """The places of moves right before an op, and loads there of values not loaded yet."""
        first = position
        while first > 0 and self.ops[first - 1] is None:
            first -= 1
        for op in range(first, position):
            (value,) = self.graph.ops[op].alternatives[0].reads
            if op not in self.leaves and value not in loaded:
                yield self.loads[value]
            yield Compute(op)


def may_be_offered(op: Op) -> bool:
    """Whether an op can have loads of its values as alternatives.

    A pinned op runs once. Its loads are later computations, and so would be its own ways for these.
    """
    return op.pinned is None or all(way.use != "again" for way in op.alternatives)


def offer_moves(graph: Graph, moves: Sequence[Move], far: Far, toll: float) -> MovesGraph:
    """Return the graph with the given moves, at most one of each value, as choices.

    `toll`: the cost of a load, as a share of its time.
    """
    return _Offer(graph, moves, far, toll).run()


class _Offer:
    def __init__(self, graph: Graph, moves: Sequence[Move], far: Far, toll: float) -> None:
        self.graph = graph
        self.far = far
        self.toll = toll
        self.values = list(graph.values)
        self.kept: dict[OpId, ValueId] = {}  # op -> a value of no bytes: it has run before
        self.moved: dict[OpId, list[ValueId]] = defaultdict(list)
        self.at: dict[OpId, list[tuple[ValueId, bool]]] = defaultdict(list)
        for move in sorted(moves, key=lambda move: (move.leave, move.made, move.value)):
            self.at[move.leave].append((move.value, True))
            self.moved[move.made].append(move.value)
        for move in moves:
            self.at[move.load].append((move.value, False))
        for op in self.moved:
            self.kept[op] = len(self.values)
            self.values.append(Value(id=len(self.values), name="stored", size_bytes=0))

    def run(self) -> MovesGraph:
        ops: list[Op] = []
        origins: list[OpId | None] = []
        place: dict[OpId, OpId] = {}
        leaves: dict[OpId, ValueId] = {}
        for op in self.graph.ops:
            for value, leaves_here in self.at.get(op.id, ()):
                if leaves_here:
                    leaves[len(ops)] = value
                ops.append(_reading(value, len(ops), op))
                origins.append(None)
            place[op.id] = len(ops)
            ops.append(msgspec.structs.replace(self._op(op), id=len(ops), partner=None))
            origins.append(op.id)
        graph = msgspec.structs.replace(
            self.graph,
            values=tuple(self.values),
            ops=tuple(ops),
            choices=moved_choices(self.graph, place),
        )
        loads = {
            way.writes[0]: Compute(place[op], number)
            for op in self.moved
            for number, way in enumerate(ops[place[op]].alternatives)
            if number >= len(self.graph.ops[op].alternatives) and len(way.writes) == 1
        }
        return MovesGraph(
            graph=graph,
            base=self.graph,
            ops=tuple(origins),
            places=MappingProxyType(place),
            leaves=MappingProxyType(leaves),
            loads=MappingProxyType(loads),
        )

    def _op(self, op: Op) -> Op:
        """The op with loads of its values among its alternatives, if they may be moved."""
        if op.id not in self.moved:
            return op
        own = [
            msgspec.structs.replace(
                way,
                writes=(*way.writes, self.kept[op.id]),
                use="first" if op.pinned is not None else way.use,
            )
            for way in op.alternatives
        ]
        return msgspec.structs.replace(
            op, pinned=None, alternatives=(*own, *self._loads(self.moved[op.id], op))
        )

    def _loads(self, values: Sequence[ValueId], op: Op) -> Iterator[Alternative]:
        """Ways to load some of the values that an op makes."""
        together = min(len(values), _MOST_TOGETHER)
        for count in range(1, together + 1):
            for some in combinations(values, count):
                took_s = sum(self.far.load_s(self.graph.values[v].size_bytes) for v in some)
                yield Alternative(
                    name="load",
                    reads=(self.kept[op.id],),
                    writes=some,
                    variants=(Variant(cost_s=self.toll * took_s),),
                    use="again",
                )


def _reading(value: ValueId, position: OpId, before: Op) -> Op:
    """An op without cost at which a value must be there."""
    way = Alternative(reads=(value,), writes=())
    return Op(
        id=position,
        target="far",
        alternatives=(way,),
        segment=before.segment,
        pinned="it is a place of moves",
    )


def _with_stores(graph: Graph, steps: Sequence[Step]) -> list[Step]:
    """Add stores of loaded values; leave out loads of values not read, and places left for none.

    A load counts if the next step that uses its value reads it. A place where a value leaves counts
    if its load comes next and the value is still there: an op may have written over it.
    """
    wanted: dict[ValueId, str] = {}  # the next step's use of a value, walking backwards
    kept: list[Step] = []
    for step in reversed(steps):
        if isinstance(step, Compute):
            way = step.alternative_in(graph)
            wanted.update(dict.fromkeys(way.writes, "written"))
            wanted.update(dict.fromkeys(way.reads, "read"))
        elif isinstance(step, Load):
            if wanted.get(step.value) != "read":
                continue
            wanted[step.value] = "loaded"
        elif wanted.get(step.value) != "loaded":
            continue
        kept.append(step)
    loaded = {step.value for step in kept if isinstance(step, Load)}
    gone: set[ValueId] = set()  # written over, or left
    result: list[Step] = []
    for step in reversed(kept):
        if isinstance(step, Free):
            if step.value in gone:
                continue
            gone.add(step.value)
        result.append(step)
        if isinstance(step, Load):
            gone.discard(step.value)
        elif isinstance(step, Compute):
            way = step.alternative_in(graph)
            if way.overwrites is not None:
                gone.add(way.overwrites)
            gone.difference_update(way.writes)
            result += [Store(value) for value in way.writes if value in loaded]
            loaded.difference_update(way.writes)
    return result
