"""How long each value of a step is unused between two uses, and where it would be away then."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tightfit.graph.ir import Graph, OpId, ValueId
from tightfit.graph.liveness import computed_ops
from tightfit.plan.assemble import Step
from tightfit.plan.plan import Compute, Far


@dataclass(frozen=True)
class Gap:
    """The longest time for which nothing uses a value."""

    value: ValueId
    made: OpId  # the op that makes it
    # after, before: the ops whose first computations use it last before the gap and first after it
    after: OpId
    before: OpId


@dataclass(frozen=True)
class Shift:
    """By how many ops a value leaves and is loaded later than the link asks for."""

    leave: int = 0
    load: int = 0


@dataclass(frozen=True)
class Move:
    """A value that is stored as soon as it is made."""

    value: ValueId
    made: OpId
    leave: OpId  # the op before whose first computation it leaves near memory
    load: OpId  # the op before whose first computation its load begins


def movable_values(graph: Graph) -> frozenset[ValueId]:
    """Return the values that a plan may move: made by ops, and used within the step only."""
    return frozenset(
        value.id
        for value in graph.values
        if value.role in ("computed", "gradient")
        and value.fate == "none"
        and value.size_bytes > 0
        and not value.stays
    )


def start_times(graph: Graph, steps: Sequence[Step]) -> list[float]:
    """Return when each op's turn begins: the first computation before it has ended then.

    In seconds of ops from the start of the step, without stalls, and last the end of the step.
    First computations are in the graph's order.
    """
    ends = [0.0] * (len(graph.ops) + 1)
    seen: set[OpId] = set()
    now = 0.0
    for step in steps:
        if isinstance(step, Compute):
            now += step.cost_s(graph)
            if step.op not in seen:
                seen.add(step.op)
                ends[step.op + 1] = now
    for op in range(len(graph.ops)):
        ends[op + 1] = max(ends[op + 1], ends[op])
    ends[-1] = now
    return ends


def gaps_of(graph: Graph, begins: Sequence[float]) -> dict[ValueId, Gap]:
    """Return the longest gap of each movable value that something reads.

    Ops that only other alternatives read are no uses: a value need not be back for them.
    """
    uses: dict[ValueId, list[OpId]] = {value: [] for value in movable_values(graph)}
    for op in computed_ops(graph):
        first = [way for way in op.alternatives if way.use != "again"]
        for value in {v for way in first for v in (*way.reads, *way.writes)}:
            if value in uses:
                uses[value].append(op.id)
    gaps: dict[ValueId, Gap] = {}
    for value, ops in uses.items():
        pairs = list(pairwise(ops))
        if pairs:
            after, before = max(pairs, key=lambda pair: begins[pair[1]] - begins[pair[0] + 1])
            if before > after + 1:
                gaps[value] = Gap(value, ops[0], after, before)
    return gaps


def place(
    gaps: Collection[Gap],
    far: Far,
    sizes: Mapping[ValueId, int],
    begins: Sequence[float],
    pace: float,
    shifts: Mapping[ValueId, Shift],
) -> list[Move]:
    """Return moves that the link can keep up with, as far as gaps allow, and shifted.

    Stores queue in the order in which values are made, and a value leaves once its store has
    ended. Loads are placed from the end backwards, each as late as it and those after it allow.

    `sizes`: bytes of values. `begins`: when each op's turn begins, and the end of the step. `pace`:
    how much longer everything takes. Above 1, the step may stall for transfers: then loads begin
    rather late than early. `shifts`: by value; those without one are not shifted.
    """
    begins = [pace * at_s for at_s in begins]
    leaves: dict[ValueId, OpId] = {}
    free_s = 0.0
    for gap in sorted(gaps, key=lambda gap: (gap.made, gap.value)):
        free_s = max(free_s, begins[gap.made + 1]) + far.store_s(sizes[gap.value])
        leave = _first_from(begins, free_s) + shifts.get(gap.value, _NONE).leave
        leaves[gap.value] = min(max(leave, gap.after + 1), gap.before)
    moves: list[Move] = []
    due_s = begins[-1]
    for gap in sorted(gaps, key=lambda gap: (-gap.before, gap.value)):
        due_s = min(due_s, begins[gap.before]) - far.load_s(sizes[gap.value])
        load = _first_from(begins, due_s) if pace > 1.0 else last_until(begins, due_s)
        load += shifts.get(gap.value, _NONE).load
        leave = leaves[gap.value]
        moves.append(Move(gap.value, gap.made, leave, min(max(load, leave), gap.before)))
    return moves[::-1]


_NONE = Shift()


def _first_from(begins: Sequence[float], at_s: float) -> OpId:
    """The first op whose turn begins no earlier; the last if none does."""
    return min(bisect_left(begins, at_s), len(begins) - 1)


def last_until(begins: Sequence[float], at_s: float) -> int:
    """Return the last turn that begins no later; the first if none does."""
    return max(bisect_right(begins, at_s) - 1, 0)
