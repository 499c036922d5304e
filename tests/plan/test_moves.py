"""Plans that move values to far memory: what they mean in bytes and seconds, what is refused."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.graphs import compute_lists, training_graphs
from support.moves import links, with_moves
from tightfit.errors import BadInput, InvalidPlan
from tightfit.graph import Alternative, Graph, Op, Segment, Value, Variant
from tightfit.plan import Compute, Enter, Far, Free, Load, Plan, Store, assemble, simulate, verify
from tightfit.plan.assemble import steps_of
from tightfit.plan.io import plan_from_json, plan_to_json
from tightfit.plan.lives import lives_of
from tightfit.plan.verify import verified_peaks

LARGE = 1 << 40
LINK = Far(capacity_bytes=LARGE, store_bytes_per_s=2.0, load_bytes_per_s=4.0)


def chain(lengths: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)) -> Graph:
    """A forward of two ops and their backward; each value has 8 bytes."""
    values = tuple(Value(id=i, name=f"v{i}", size_bytes=8) for i in range(3))
    values += (Value(id=3, name="v3", size_bytes=8, fate="returned"),)
    reads, writes = [(), (0,), (1, 0), (2, 0)], [(0,), (1,), (2,), (3,)]
    ops = tuple(
        Op(
            id=i,
            target=f"op{i}",
            segment=int(i >= 2),
            alternatives=(
                Alternative(reads=reads[i], writes=writes[i], variants=(Variant(cost_s=cost),)),
            ),
        )
        for i, cost in enumerate(lengths)
    )
    segments = (Segment(id=0, phase="forward"), Segment(id=1, phase="backward"))
    return Graph(values=values, ops=ops, segments=segments)


def plan_of(graph: Graph, *steps: Compute | Store | Load | Free, far: Far = LINK) -> Plan:
    return assemble(graph, steps, budget_bytes=LARGE, far=far)


def test_a_store_that_ends_in_time_costs_nothing() -> None:
    graph = chain((1.0, 4.0, 2.0, 1.0))
    plan = plan_of(
        graph,
        Compute(0),
        Store(0),
        Compute(1),
        Free(0),
        Load(0),
        Compute(2),
        Compute(3),
    )
    verify(plan, graph)
    result = simulate(graph, plan)
    store, load = result.transfers
    assert (store.begin_s, store.end_s) == (1.0, 5.0)
    assert (load.begin_s, load.end_s) == (5.0, 7.0)
    assert result.stall_s == 2.0  # of the load: nothing runs between it and its reader
    assert result.time_s == 10.0
    assert result.overhead == 10.0 / 8.0 - 1.0
    assert result.far_peak_bytes == 8
    assert result.moved_bytes == 16


def test_a_free_waits_for_the_store_and_a_reader_for_the_load() -> None:
    graph = chain()
    plan = plan_of(
        graph, Compute(0), Store(0), Compute(1), Free(0), Load(0), Compute(2), Compute(3)
    )
    assert simulate(graph, plan).stall_s == 3.0 + 2.0


def test_transfers_queue_in_each_direction() -> None:
    graph = chain()
    plan = plan_of(
        graph,
        Compute(0),
        Store(0),
        Compute(1),
        Store(1),
        Free(0),
        Free(1),
        Load(1),
        Load(0),
        Compute(2),
        Compute(3),
    )
    verify(plan, graph)
    times = [(t.begin_s, t.end_s) for t in simulate(graph, plan).transfers]
    assert times == [(1.0, 5.0), (5.0, 9.0), (9.0, 11.0), (11.0, 13.0)]


def test_near_memory_is_taken_until_the_free_and_from_the_load_on() -> None:
    graph = chain()
    plan = plan_of(
        graph, Compute(0), Store(0), Compute(1), Free(0), Load(0), Compute(2), Compute(3)
    )
    result = simulate(graph, plan)
    at = {type(step): i for i, step in enumerate(plan.instructions)}
    assert result.after_bytes[plan.instructions.index(Free(0))] == 8
    assert result.after_bytes[at[Load]] == 16


def test_what_leaves_before_user_code_runs_is_away_while_it_runs() -> None:
    graph = chain()
    plan = plan_of(
        graph, Compute(0), Store(0), Compute(1), Free(0), Load(0), Compute(2), Compute(3)
    )
    kinds = [type(step) for step in plan.instructions]
    enters = [place for place, kind in enumerate(kinds) if kind is Enter]
    assert kinds.index(Free) < enters[1] < kinds.index(Load)
    assert plan_of(graph, *steps_of(graph, plan)) == plan


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ((Compute(0), Compute(1), Load(0), Compute(2), Compute(3)), "never stored"),
        ((Compute(0), Store(0), Store(0), Compute(1)), "was stored at instruction"),
        ((Store(1), Compute(0), Compute(1)), "not alive"),
        ((Compute(0), Store(0), Compute(1), Free(0), Compute(2), Compute(3)), "it reads"),
        ((Compute(0), Compute(1), Compute(2), Compute(3), Store(3)), "returned"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    steps: tuple[Compute | Store | Load | Free, ...], why: str
) -> None:
    graph = chain()
    with pytest.raises(InvalidPlan, match=why):
        verify(plan_of(graph, *steps), graph)


def test_a_load_of_a_value_that_is_alive_is_refused() -> None:
    graph = chain()
    plan = plan_of(graph, Compute(0), Store(0), Compute(1), Compute(2), Compute(3))
    steps = list(plan.instructions)
    steps.insert(3, Load(0))
    with pytest.raises(InvalidPlan, match="alive in near memory"):
        verify(msgspec.structs.replace(plan, instructions=tuple(steps)), graph)


def test_moves_without_far_memory_and_beyond_its_capacity_are_refused() -> None:
    graph = chain()
    plan = plan_of(
        graph, Compute(0), Store(0), Compute(1), Free(0), Load(0), Compute(2), Compute(3)
    )
    verify(plan, graph)
    with pytest.raises(InvalidPlan, match="names no far memory"):
        verify(msgspec.structs.replace(plan, far=None), graph)
    small = msgspec.structs.replace(LINK, capacity_bytes=7)
    with pytest.raises(InvalidPlan, match="capacity of 7"):
        verify(msgspec.structs.replace(plan, far=small), graph)


@st.composite
def moved_plans(draw: st.DrawFn) -> tuple[Graph, Plan]:
    graph = draw(training_graphs())
    plan = assemble(
        graph,
        draw(with_moves(graph, draw(compute_lists(graph)))),
        budget_bytes=LARGE,
        gradients=draw(st.sampled_from(["fresh", "accumulated"])),
        far=draw(links),
    )
    return graph, plan


@given(moved_plans())
def test_simulator_verifier_and_lives_agree_about_bytes(case: tuple[Graph, Plan]) -> None:
    graph, plan = case
    result = simulate(graph, plan)
    assert verified_peaks(plan, graph) == (result.peak_bytes, result.far_peak_bytes)
    lives = lives_of(graph, plan)
    ticks = {life.lower for life in lives}
    held = [sum(o.size_bytes for o in lives if o.lower <= t < o.upper) for t in ticks]
    assert max(held, default=0) + graph.constant_bytes == result.peak_bytes


@given(moved_plans())
def test_transfers_keep_their_queue_and_stalls_make_the_step_longer(
    case: tuple[Graph, Plan],
) -> None:
    graph, plan = case
    result = simulate(graph, plan)
    assert result.stall_s >= 0
    for direction in ("store", "load"):
        queue = [t for t in result.transfers if t.direction == direction]
        assert all(a.end_s <= b.begin_s for a, b in pairwise(queue))
    stored = {t.value: t.end_s for t in result.transfers if t.direction == "store"}
    loads = [t for t in result.transfers if t.direction == "load"]
    assert all(stored[t.value] <= t.begin_s for t in loads)
    assert all(t.end_s <= result.time_s for t in result.transfers)
    moved = sum(t.size_bytes for t in result.transfers if t.direction == "store")
    assert plan.far is not None
    assert moved <= plan.far.store_bytes_per_s * result.time_s + 1e-6


@given(moved_plans())
def test_files_and_steps_give_the_same_plan_again(case: tuple[Graph, Plan]) -> None:
    graph, plan = case
    assert plan_from_json(plan_to_json(plan)) == plan
    again = assemble(
        graph,
        steps_of(graph, plan),
        budget_bytes=plan.budget_bytes,
        gradients=plan.gradients,
        far=plan.far,
    )
    assert again == plan


@given(training_graphs(), st.data())
def test_a_plan_without_moves_is_written_as_before(graph: Graph, data: st.DataObject) -> None:
    computes = data.draw(compute_lists(graph))
    plan = assemble(graph, computes, budget_bytes=LARGE)
    assert b"far" not in plan_to_json(plan)


def test_a_link_that_moves_nothing_is_refused_in_a_file() -> None:
    graph = chain()
    plan = plan_of(graph, Compute(0), Compute(1), Compute(2), Compute(3))
    text = plan_to_json(plan).replace(b'"load_bytes_per_s":4.0', b'"load_bytes_per_s":0.0')
    with pytest.raises(BadInput, match="more than 0 bytes"):
        plan_from_json(text)
