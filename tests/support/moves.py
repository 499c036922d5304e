"""Random moves to far memory in the steps of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import strategies as st

from tightfit.graph import Graph
from tightfit.plan import Compute, Far, Free, Load, Store
from tightfit.plan.assemble import Step

links = st.builds(
    Far,
    capacity_bytes=st.just(1 << 40),
    store_bytes_per_s=st.sampled_from([0.5, 1.0, 8.0]),
    load_bytes_per_s=st.sampled_from([0.5, 1.0, 8.0]),
    latency_s=st.sampled_from([0.0, 0.25]),
)


@st.composite
def with_moves(draw: st.DrawFn, graph: Graph, computes: Sequence[Compute]) -> list[Step]:
    """Draw which values of a list of computes are away between two uses, some of them twice."""
    insertions: list[tuple[int, int, Step]] = []  # position, order there
    for value in graph.values:
        uses = _uses(graph, computes, value.id)
        gaps = [
            (first, second)
            for first, second in pairwise(uses)
            if not _is_made(graph, computes[second], value.id)
        ]
        may_move = value.fate == "none" and not (value.is_constant or value.stays)
        if not may_move or not gaps or not draw(st.booleans()):
            continue
        first, second = draw(st.sampled_from(gaps))
        since = max(
            place
            for place in uses
            if place <= first and _makes(graph, computes, place, value.id, uses)
        )
        store = draw(st.integers(since + 1, first + 1))
        leave = draw(st.integers(first + 1, second))
        load = draw(st.integers(leave, second))
        insertions += [(store, 0, Store(value.id)), (leave, 1, Free(value.id))]
        insertions += [(load, 2, Load(value.id))]
        later = [gap for gap in gaps if gap[0] >= second]
        if later and draw(st.booleans()):
            first, second = draw(st.sampled_from(later))
            leave = draw(st.integers(first + 1, second))
            load = draw(st.integers(leave, second))
            insertions += [(leave, 1, Free(value.id)), (load, 2, Load(value.id))]
    steps: list[Step] = []
    insertions.sort(key=lambda item: item[:2])
    for position in range(len(computes) + 1):
        steps += [step for at, _, step in insertions if at == position]
        steps += computes[position : position + 1]
    return steps


def _uses(graph: Graph, computes: Sequence[Compute], value: int) -> list[int]:
    return [
        place
        for place, step in enumerate(computes)
        for way in [graph.ops[step.op].alternatives[step.alternative]]
        if value in way.reads or value in way.writes
    ]


def _is_made(graph: Graph, step: Compute, value: int) -> bool:
    return value in graph.ops[step.op].alternatives[step.alternative].writes


def _makes(
    graph: Graph, computes: Sequence[Compute], place: int, value: int, uses: Sequence[int]
) -> bool:
    """Whether a value is made there; a tangent counts as made where it is first read."""
    return _is_made(graph, computes[place], value) or (
        graph.values[value].role == "tangent" and place == uses[0]
    )
