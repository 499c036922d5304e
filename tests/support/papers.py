"""Small graphs and exhaustive searches for the papers' planners, straight from the definitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from hypothesis import assume
from hypothesis import strategies as st

from tightfit.graph.ir import Alternative, Graph, Op, Segment, Value, Variant
from tightfit.graph.validate import validate_graph
from tightfit.plan.assemble import assemble, keep_everything
from tightfit.plan.simulate import simulate
from tightfit.planners.base import Task
from tightfit.planners.bounds import working_set_bytes
from tightfit.planners.papers.stages.staged import Implementation, Staged, staged

SECOND = 1e-3


def chain(
    sizes: Sequence[int], *, costs: Sequence[int] | None = None, backward: bool = True
) -> Graph:
    """A chain of forward ops and, mirrored, backward ops that read the forward values."""
    length = len(sizes)
    costs = costs or [1] * length
    values = [Value(id=i, name=f"x{i}", size_bytes=size) for i, size in enumerate(sizes)]
    ops = [op(i, [i - 1] if i else [], [i], cost=costs[i]) for i in range(length)]
    for step in range(length if backward else 0):
        node = length - 1 - step
        this = length + step
        values.append(Value(id=this, name=f"g{node}", size_bytes=sizes[node]))
        reads = [node, *([this - 1] if step else [])]
        ops.append(op(this, reads, [this], cost=costs[node], segment=1))
    return graph_of(values, ops)


def op(
    number: int,
    reads: Iterable[int],
    writes: Iterable[int],
    *,
    cost: int = 1,
    workspace: int = 0,
    segment: int = 0,
    pinned: str | None = None,
) -> Op:
    """One op with one implementation; costs in milliseconds."""
    variant = Variant(cost_s=cost * SECOND, workspace_bytes=workspace)
    way = Alternative(reads=tuple(reads), writes=tuple(writes), variants=(variant,))
    return Op(id=number, target=f"op{number}", alternatives=(way,), segment=segment, pinned=pinned)


def graph_of(values: Sequence[Value], ops: Sequence[Op], *, outside: int = 0) -> Graph:
    """A graph of one forward and one backward segment."""
    segments = (
        Segment(id=0, phase="forward"),
        Segment(id=1, phase="backward", outside_bytes=outside),
    )
    buffers = sum(v.size_bytes for v in values if v.role == "buffer")
    return validate_graph(
        Graph(
            values=tuple(values),
            ops=tuple(ops),
            segments=segments,
            constants_bytes={"buffers": buffers},
        )
    )


def peak_bytes(graph: Graph) -> int:
    """The peak with nothing recomputed."""
    plan = assemble(graph, keep_everything(graph), budget_bytes=2**40)
    return simulate(graph, plan).peak_bytes


@st.composite
def tasks(draw: st.DrawFn, most_nodes: int = 6) -> Task:
    """A random step with every kind of value, and a budget around what it needs."""
    forward = draw(st.sampled_from([most_nodes - 3, 3, 2]))
    backward = draw(st.sampled_from([min(forward, most_nodes - forward), 1, 2]))
    values: list[Value] = []
    ops: list[Op] = []

    def new(role: str = "computed", fate: str = "none", **more: int) -> int:
        size = draw(st.sampled_from([4, 5, 6, 3, 2, 1, 0]))
        name = f"v{len(values)}"
        values.append(
            Value(id=len(values), name=name, size_bytes=size, role=role, fate=fate, **more)  # type: ignore[arg-type]
        )
        return len(values) - 1

    readable: list[int] = []
    if draw(st.booleans()):
        readable.append(new(role="buffer"))
    tangents = [new(role="tangent", segment=1)] if draw(st.booleans()) else []
    for number in range(forward + backward):
        segment = int(number >= forward)
        offered = readable + (tangents if segment else [])
        mirrored = 2 * forward - 1 - number
        natural = [number - 1] if number else []
        natural += [mirrored, mirrored - 1] if 0 < mirrored < forward <= number else []
        reads = [ops[i].alternatives[0].writes[0] for i in natural if draw(st.integers(0, 4))]
        reads = [v for v in reads if values[v].fate in ("none", "returned")]
        if offered and draw(st.booleans()):
            reads.append(draw(st.sampled_from(offered)))
        reads = list(dict.fromkeys(reads))
        if number == forward + backward - 1:
            reads += [v for v in tangents if v not in reads]
        fates = ["none"] * 6 + (["handed_over"] if segment else ["returned"])
        writes = []
        for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
            fate = draw(st.sampled_from(fates))
            writes.append(new("gradient" if fate == "handed_over" else "computed", fate))
        if values[0].role == "buffer" and not segment and draw(st.integers(0, 7)) == 0:
            writes.append(new(fate="written_back", replaces=0))
        pinned = "random" if draw(st.integers(0, 9)) == 0 else None
        ops.append(
            op(
                number,
                reads,
                writes,
                cost=draw(st.integers(1, 5)),
                workspace=draw(st.sampled_from([0, 0, 0, 2])),
                segment=segment,
                pinned=pinned,
            )
        )
        readable += [v for v in writes if values[v].fate in ("none", "returned")]
    graph = graph_of(values, ops, outside=draw(st.sampled_from([0, 0, 3])))
    gradients = draw(st.sampled_from(["fresh", "accumulated"]))
    least, most = working_set_bytes(graph, gradients)[0], peak_bytes(graph)
    assume(least < most)
    budget = draw(st.integers(least, most - 1))
    return Task(graph=graph, budget_bytes=budget, gradients=gradients)


def subsets(items: Iterable[int]) -> Iterator[frozenset[int]]:
    """Every subset."""
    pool = list(items)
    for count in range(len(pool) + 1):
        yield from map(frozenset, itertools.combinations(pool, count))


def base_cost(problem: Staged) -> float:
    """Seconds with nothing computed again."""
    return sum(node.first.cost_s for node in problem.nodes)


def kept_at(problem: Staged, stage: int) -> frozenset[int]:
    """Values that somebody keeps when a stage begins."""
    return frozenset(v for v, s in problem.values.items() if s.begins <= stage < s.forced_until)


def least_checkmate_overhead(task: Task) -> float:
    """The optimum over all (R, S) by dynamic programming over what is resident; inf if none."""
    problem = staged(task)
    crossings = {crossing.stage: crossing for crossing in problem.crossings}
    costs: dict[frozenset[int], float] = {frozenset(): 0.0}
    count = len(problem.nodes)
    for stage in range(count + 1):
        costs = _enter(problem, crossings.get(stage), stage, costs)
        if stage < count:
            costs = _advance(problem, stage, costs)
    best = min(costs.values(), default=math.inf)
    return best / base_cost(problem) - 1.0


def _enter(problem, crossing, stage, costs):
    gone = {v for v, s in problem.values.items() if s.ends == stage}
    entered: dict[frozenset[int], float] = {}
    for resident, cost in costs.items():
        left = resident - gone
        if crossing is not None:
            if problem.size(list(left)) + crossing.outside_bytes > problem.capacity_bytes:
                continue
            left |= frozenset(crossing.tangents)
            if problem.size(list(left)) > problem.capacity_bytes:
                continue
        entered[left] = min(cost, entered.get(left, math.inf))
    return entered


def _advance(problem, stage, costs):
    following: dict[frozenset[int], float] = {}
    again = [i for i in range(stage) if problem.may_recompute(i, stage)]
    kept = kept_at(problem, stage + 1)
    for resident, before in costs.items():
        for chosen in subsets(again):
            order = [*sorted(chosen), stage]
            ways = [problem.nodes[i].implementation(i == stage) for i in order]
            made = {v for w in ways for v in w.writes}
            cost = before + sum(way.cost_s for way in ways)
            if not _inputs_there(problem, order, ways, resident, stage):
                continue
            there = resident | made
            free = {v for v in there if not problem.values[v].size_bytes or v in kept}
            optional = {v for v in there - free if _is_read_after(problem, v, stage)}
            for held in subsets(optional):
                target = held | free
                if cost >= following.get(target, math.inf):
                    continue
                if not all(_comes_from(problem, order, stage, v, resident) for v in held):
                    continue
                kept_now = kept_at(problem, stage)
                written = {v for v in kept_now if problem.values[v].ends == stage + 1}
                if _stage_fits(problem, ways, resident, target | written):
                    following[target] = cost
    return following


def _is_read_after(problem, value, stage) -> bool:
    if stage + 1 == len(problem.nodes):
        return False
    readers = [i for i, node in enumerate(problem.nodes) if value in _all_reads(node)]
    return any(i > stage or problem.may_recompute(i, stage + 1) for i in readers)


def _comes_from(problem, order, stage, value, resident):
    return value in resident or any(problem.makes(i, i == stage, value) for i in order)


def _inputs_there(problem, order, ways, resident, stage) -> bool:
    there = set(resident)
    for node, way in zip(order, ways, strict=True):
        if not there.issuperset(way.reads):
            return False
        there.update(v for v in way.writes if problem.makes(node, node == stage, v))
    return True


def _stage_fits(problem: Staged, ways: Sequence[Implementation], resident, target) -> bool:
    live = set(resident)
    for position, way in enumerate(ways):
        read_later = {v for later in ways[position:] for v in later.reads}
        live = {v for v in live if v in target or v in read_later}
        during = problem.size(list(live)) + problem.size(list(way.writes)) + way.workspace_bytes
        if during > problem.capacity_bytes:
            return False
        live.update(way.writes)
    return True


def least_monet_overhead(task: Task, *, loose: bool = False) -> float:
    """The optimum over all (s, r) of MONeT's own byte accounting; inf if none."""
    problem = staged(task)
    nodes, values = problem.nodes, problem.values
    forward = sum(node.is_forward for node in nodes)
    made_forward = {v for node in nodes[:forward] for v in node.first.writes}
    size = lambda chosen: sum(values[v].size_bytes for v in chosen)  # noqa: E731
    room = problem.capacity_bytes

    def before(chosen, node):
        return {v for v in chosen if values[v].producer < node}

    def local(node, limit):
        reads = {v for t in range(node, limit) for v in _all_reads(nodes[t]) if v in made_forward}
        return before(reads, node)

    def gradients(node):
        reads = {v for b in range(node, len(nodes)) for v in nodes[b].first.reads}
        reads |= kept_at(problem, node)
        return {v for v in reads - made_forward if values[v].begins <= node}

    def forward_fits(saved):
        for i in range(forward):
            held = local(i, forward) | before(saved, i) | (kept_at(problem, i) & made_forward)
            held = {v for v in held if i < values[v].ends}
            way = nodes[i].first
            if size(held) + size(way.writes) + way.workspace_bytes > room:
                return False
        return True

    def crossing_fits(stage, saved):
        return all(
            crossing.outside_bytes == 0
            or size(saved)
            + size(
                gradients(stage) - set(crossing.tangents)
                if stage < len(nodes)
                else kept_at(problem, stage) - made_forward
            )
            + crossing.outside_bytes
            <= room
            for crossing in problem.crossings
            if crossing.stage == stage
        )

    def stage_fits(stage, old, chosen, saved):
        needed = {v for v in nodes[stage].first.reads if v in made_forward}
        alive = size(gradients(stage))
        useful = [
            values[v].producer
            for b in range(stage, len(nodes))
            for v in nodes[b].first.reads
            if v in made_forward
            and values[v].recoverable
            and problem.may_recompute(values[v].producer, stage)
        ]
        limit = forward if loose else max(useful, default=-1) + 1
        if alive + size(old) > room:
            return False
        for i in range(forward):
            passed = before(saved | needed, i + 1)
            if (
                alive
                + size(passed | {v for v in old if values[v].producer > i})
                + size(passed & {v for v in old if values[v].producer > i})
                > room
            ):
                return False
            if i in chosen:
                way = nodes[i].again
                held = before(saved | needed, i) | local(i, limit)
                later = size(v for v in old if values[v].producer >= i)
                if alive + size(held) + later + size(way.writes) + way.workspace_bytes > room:
                    return False
        way = nodes[stage].first
        total = alive + size(saved | needed) + size(way.writes) + way.workspace_bytes
        return total <= room

    start_kept = kept_at(problem, forward) & made_forward
    possible = {v for v in made_forward if values[v].ends > forward}
    costs = {
        held | start_kept: 0.0
        for held in subsets(possible - start_kept)
        if forward_fits(held | start_kept) and crossing_fits(forward, held | start_kept)
    }
    for stage in range(forward, len(nodes)):
        following: dict[frozenset[int], float] = {}
        kept = kept_at(problem, stage + 1) & made_forward
        again = [i for i in range(forward) if problem.may_recompute(i, stage)]
        for old, cost in costs.items():
            for chosen in subsets(again):
                there = {v for i in chosen for v in nodes[i].again.writes if values[v].recoverable}
                there |= old
                reads = [v for i in chosen for v in nodes[i].again.reads] + [
                    v for v in nodes[stage].first.reads if v in made_forward
                ]
                if not there.issuperset(reads):
                    continue
                total = cost + sum(nodes[i].again.cost_s for i in chosen)
                for held in subsets(there - kept):
                    saved = held | kept
                    if (
                        total < following.get(saved, math.inf)
                        and stage_fits(stage, old, chosen, saved)
                        and crossing_fits(stage + 1, saved)
                    ):
                        following[saved] = total
        costs = following
    best = min(costs.values(), default=math.inf)
    return best / base_cost(problem)


def _all_reads(node):
    again = node.again.reads if node.again is not None else ()
    return {*node.first.reads, *again}
