"""A training step in the papers' terms, and schedules by the values resident between stages.

Checkmate, MONeT, Chen and Griewank plan a list of *nodes* in a fixed order. Stage ``t`` is
everything from the end of first computation ``t - 1`` up to and including first computation ``t``.
In a stage any earlier node may be computed again, in index order.

How a `Graph` becomes nodes (decided here once, for all of the papers' planners):

- One node per op that a step without recomputation runs, in that order. A node makes a *set* of
  values that live and die one by one; the papers' single value per node is the special case.
- A node has a way to be computed `first` (the default alternative at its cheapest variant) and
  maybe another to be computed `again`. That is the cheapest bitwise alternative that may serve, not
  in place. Nothing else is chosen among alternatives, so a plan may cost more than one that does.
- Pinned ops, ops whose only implementations would write a gradient or a buffer twice, and ops that
  read a buffer which is replaced later have no `again`. Their values stay until nothing can need
  them. For buffers this is conservative: they might be computed again before the replacement.
- A value read by another program is never computed again (conservative).
- Returned values and fresh gradients stay from their first computation to the end of the step,
  written-back ones to the end of their segment. Tangents stay from their segment's entry (a tangent
  without readers through the first stage there, conservative).
- Random-number states of all ops that may be computed again are reserved (conservative by some
  bytes each, since only those that *are* computed again keep theirs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tightfit.errors import BadInput
from tightfit.graph.ir import Alternative, Graph, Op, OpId, Use, ValueId
from tightfit.plan.assemble import keep_everything
from tightfit.plan.plan import Compute
from tightfit.planners.base import Task

Residency = list[int]
"""For each stage, a bit set of the value ids alive when it begins."""


class Implementation(msgspec.Struct, frozen=True, kw_only=True):
    """One way to compute a node: values read and written, seconds, bytes of workspace."""

    compute: Compute
    reads: tuple[ValueId, ...]
    writes: tuple[ValueId, ...]
    cost_s: float
    workspace_bytes: int
    overwrites: ValueId | None = None  # the read value over which the first is written


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One op of the step: how it is computed first and, unless None, again."""

    name: str
    first: Implementation
    again: Implementation | None
    is_forward: bool
    program: int

    def implementation(self, is_first: bool) -> Implementation:
        """The way that serves the first computation, or a later one where there is any."""
        if is_first:
            return self.first
        assert self.again is not None
        return self.again


class StoredValue(msgspec.Struct, frozen=True, kw_only=True):
    """A value: its bytes and when it must or may be resident."""

    size_bytes: int
    producer: int | None  # the node that makes it; None for a tangent
    begins: int  # the first stage at whose beginning it may be resident
    # It must be resident at the beginning of every stage from `begins` to before this stage
    forced_until: int
    ends: int  # it is gone from the beginning of this stage on
    recoverable: bool  # whether it may be dropped and come back by computing its producer again


class Crossing(msgspec.Struct, frozen=True, kw_only=True):
    """A segment is entered when `stage` begins: bytes outside the plan, tangents that appear."""

    stage: int
    outside_bytes: int
    tangents: tuple[ValueId, ...]


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a schedule: recomputations of nodes before `limit`, then maybe a first
    computation."""

    limit: int  # nodes below this may be computed again
    # The node computed for the first time at its end; None in a stage of recomputations only
    first: int | None


class Staged(msgspec.Struct, frozen=True, kw_only=True):
    """A planning problem in the papers' terms (see the module's text)."""

    nodes: tuple[Node, ...]  # in the order of their first computations
    values: Mapping[ValueId, StoredValue]  # every value that is not resident the whole step
    capacity_bytes: int  # the budget less constants and reserved random-number states
    crossings: tuple[Crossing, ...]  # where segments are entered

    @property
    def base_cost_s(self) -> float:
        """Seconds with nothing computed again."""
        return sum(node.first.cost_s for node in self.nodes)

    def size(self, values: Iterator[ValueId] | Sequence[ValueId]) -> int:
        return sum(self.values[value].size_bytes for value in values)

    def may_recompute(self, node: int, stage: int) -> bool:
        """Whether the node may be computed again in the stage of first computation `stage`."""
        chosen = self.nodes[node]
        return (
            node < stage
            and chosen.again is not None
            and chosen.program == self.nodes[stage].program
        )

    def makes(self, node: int, is_first: bool, value: ValueId) -> bool:
        """Whether computing the node (first or again) leaves this value for later readers."""
        if is_first:
            return value in self.nodes[node].first.writes
        again = self.nodes[node].again
        return again is not None and value in again.writes and self.values[value].recoverable


def staged(task: Task, order: Sequence[OpId] = ()) -> Staged:
    """Return a planning problem in the papers' terms.

    `order`: another valid order of first computations; ops that are not named keep the graph's
    order and come last in their segment. Raises `BadInput` if the default implementation of an op
    overwrites its input: the papers' programs with one implementation per op have no such node.
    """
    graph = task.graph
    rank = {op: position for position, op in enumerate(order)}
    firsts = sorted(
        keep_everything(graph),
        key=lambda compute: (
            graph.ops[compute.op].segment,
            rank.get(compute.op, len(rank)),
            compute.op,
        ),
    )
    usable = usable_again(graph, firsts)
    nodes = tuple(_node(graph, compute, usable) for compute in firsts)
    crossings = _crossings(graph, firsts)
    ends = _segment_ends(graph, firsts)
    values: dict[ValueId, StoredValue] = {}
    for index, node in enumerate(nodes):
        for value in node.first.writes:
            end = ends[graph.ops[node.first.compute.op].segment]
            values[value] = _stored_value(task, nodes, index, value, end, len(firsts))
    for crossing in crossings:
        for value in crossing.tangents:
            values[value] = StoredValue(
                size_bytes=graph.values[value].size_bytes,
                producer=None,
                begins=crossing.stage,
                forced_until=crossing.stage + 1,
                ends=len(firsts) + 1,
                recoverable=False,
            )
    states = sum(
        graph.ops[node.first.compute.op].random_state_bytes
        for node in nodes
        if node.again is not None
    )
    return Staged(
        nodes=nodes,
        values=_keep_foreign(values, nodes),
        capacity_bytes=task.budget_bytes - graph.constant_bytes - states,
        crossings=crossings,
    )


def usable_again(graph: Graph, order: Sequence[Compute]) -> set[ValueId]:
    """The values a later computation may read: made by nodes, or constant and never replaced."""
    made = {v for compute in order for v in compute.alternative_in(graph).writes}
    given = {v.id for v in graph.values if v.is_constant or v.role == "tangent"}
    return (made | given) - {v.replaces for v in graph.values if v.replaces is not None}


def _node(graph: Graph, compute: Compute, usable: set[ValueId]) -> Node:
    op = graph.ops[compute.op]
    if compute.alternative_in(graph).overwrites is not None:
        raise BadInput(
            f"the only first implementation of op {op.id} ({op.target}) in "
            f"{op.module or 'the model'} that this planner may use writes over its input. "
            "The papers' planners take one out-of-place implementation per op: give the op a "
            "default that does not overwrite, or use the default planner"
        )
    segment = graph.segments[op.segment]
    return Node(
        name=f"{op.module or 'op ' + str(op.id)}: {op.target}",
        first=implementation(graph, op, compute.alternative, compute.variant),
        again=_again(graph, op, usable),
        is_forward=segment.phase == "forward",
        program=segment.program,
    )


def implementation(graph: Graph, op: Op, alternative: int, variant: int) -> Implementation:
    """Return one variant of an alternative in the papers' terms."""
    chosen = op.alternatives[alternative]
    return Implementation(
        compute=Compute(op.id, alternative, variant),
        reads=tuple(sorted({v for v in chosen.reads if not graph.values[v].is_constant})),
        writes=chosen.writes,
        cost_s=chosen.variants[variant].cost_s,
        workspace_bytes=chosen.variants[variant].workspace_bytes,
        overwrites=chosen.overwrites,
    )


def _again(graph: Graph, op: Op, usable: set[ValueId]) -> Implementation | None:
    if op.pinned is not None:
        return None
    ways = [
        implementation(graph, op, number, variant)
        for number, alternative in enumerate(op.alternatives)
        if serves_again(graph, op, alternative, usable)
        for variant in range(len(alternative.variants))
    ]
    return min(ways, key=lambda way: way.cost_s, default=None)


def serves_again(graph: Graph, op: Op, alternative: Alternative, usable: set[ValueId]) -> bool:
    """Whether an alternative may compute its op again, anywhere in the program."""
    written = {graph.values[value].fate for value in alternative.writes}
    default = op.alternatives[0]
    return (
        alternative.use != "first"
        and alternative.exactness == "bitwise"
        and alternative.overwrites is None
        and not written & {"handed_over", "written_back"}
        and usable.issuperset(alternative.reads)
        and set(alternative.writes) <= set(default.writes)
    )


def _crossings(graph: Graph, order: Sequence[Compute]) -> tuple[Crossing, ...]:
    """The segments entered after the first, each at the stage of the first node at or after it."""
    entered: dict[int, list[int]] = {}
    for segment in graph.segments:
        stage = next(
            (i for i, c in enumerate(order) if graph.ops[c.op].segment >= segment.id), len(order)
        )
        entered.setdefault(stage, []).append(segment.id)
    return tuple(
        Crossing(
            stage=stage,
            outside_bytes=_outside(graph, segments),
            tangents=tuple(v.id for v in graph.values if v.segment in segments),
        )
        for stage, segments in entered.items()
    )


def _outside(graph: Graph, segments: Sequence[int]) -> int:
    """The most bytes outside the plan while entering these segments one after the other."""
    most = appeared = 0
    for segment in segments:
        most = max(most, appeared + graph.segments[segment].outside_bytes)
        appeared += sum(v.size_bytes for v in graph.values if v.segment == segment)
    return most


def _segment_ends(graph: Graph, order: Sequence[Compute]) -> list[int]:
    """For each segment, the stage at whose beginning a later one is entered."""
    return [
        next((i for i, c in enumerate(order) if graph.ops[c.op].segment > segment.id), len(order))
        for segment in graph.segments
    ]


def _stored_value(
    task: Task, nodes: Sequence[Node], producer: int, value: ValueId, segment_end: int, count: int
) -> StoredValue:
    info = task.graph.values[value]
    forced = producer + 1
    ends = count + 1
    if info.stays_to_end(task.gradients):
        forced = count + 1
    elif info.fate == "written_back":
        forced = ends = segment_end
    again = nodes[producer].again
    return StoredValue(
        size_bytes=info.size_bytes,
        producer=producer,
        begins=producer + 1,
        forced_until=forced,
        ends=ends,
        recoverable=info.fate == "none" and again is not None and value in again.writes,
    )


def _keep_foreign(
    values: dict[ValueId, StoredValue], nodes: Sequence[Node]
) -> dict[ValueId, StoredValue]:
    """Clear `recoverable` where a reader is of another program."""
    foreign: set[ValueId] = set()
    for node in nodes:
        for way in (node.first, node.again):
            for value in way.reads if way is not None else ():
                producer = values[value].producer
                if producer is not None and nodes[producer].program != node.program:
                    foreign.add(value)
    return {
        value: msgspec.structs.replace(
            stored, recoverable=stored.recoverable and value not in foreign
        )
        for value, stored in values.items()
    }


def without_choice(graph: Graph, problem: Staged) -> Graph:
    """Return the graph with only the ways that the problem has, for other planners to plan."""
    ways = {node.first.compute.op: (node.first, node.again) for node in problem.nodes}
    ops = list(graph.ops)
    for op, (first, again) in ways.items():
        kept = [_alternative(graph, first, "any" if again is not None else "first")]
        if again is not None and again.compute != first.compute:
            kept = [_alternative(graph, first, "first"), _alternative(graph, again, "again")]
        pinned = graph.ops[op].pinned
        if again is None and pinned is None:
            pinned = "no implementation serves a later computation"
        ops[op] = msgspec.structs.replace(ops[op], alternatives=tuple(kept), pinned=pinned)
    return msgspec.structs.replace(graph, ops=tuple(ops), choices=())


def _alternative(graph: Graph, way: Implementation, use: Use) -> Alternative:
    chosen = way.compute.alternative_in(graph)
    return msgspec.structs.replace(
        chosen, use=use, variants=(chosen.variants[way.compute.variant],)
    )
