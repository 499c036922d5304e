"""Requests are led to their places by fillers; whatever differs is only placed elsewhere."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.pools import FakeArenaMemory
from tightfit.arenas.fillers import FilledStep, FillerPlacement, placing_obstacle
from tightfit.layout.blocks import Block
from tightfit.layout.holes import CELL_BYTES, LEAST_BYTES, SMALL_BYTES, Script, script_of
from tightfit.plan.lives import lives_of
from tightfit.plan.shared import load_shared
from tightfit.studies.dry_step import graph_of

MIB = 1 << 20


@st.composite
def steps(draw: st.DrawFn) -> list[Block]:
    """Blocks that instructions request, several of one instruction among them, often alike."""
    instructions = draw(st.integers(1, 12))
    sizes = st.sampled_from([SMALL_BYTES + 1, 2 * MIB, 3 * MIB - 700, 4 * MIB, 7 * MIB + 5])
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, instructions), st.integers(1, 9), sizes),
            min_size=1,
            max_size=14,
        )
    )
    births = sorted(rows, key=lambda row: row[0])
    return [Block(n, 2 * at, 2 * at + life, size) for n, (at, life, size) in enumerate(births)]


def memories() -> tuple[FillerPlacement, list[FakeArenaMemory]]:
    made: list[FakeArenaMemory] = []

    def memory_for(height: int) -> FakeArenaMemory:
        made.append(FakeArenaMemory(height))
        return made[-1]

    return FillerPlacement(memory_for), made


def run(
    step: FilledStep,
    blocks: list[Block],
    memory: FakeArenaMemory,
    draw: random.Random,
    late: float = 0.0,
) -> dict[int, Any]:
    """Take all turns; request and free what blocks say; return places, and what is alive."""
    alive: dict[int, Any] = {}
    found: dict[int, Any] = {}
    for at in sorted({2 * number for number in step.script.turns}):
        gone = [b.id for b in blocks if b.upper <= at and b.id in alive and draw.random() >= late]
        draw.shuffle(gone)
        for number in gone:
            del alive[number]
        step.turn(at // 2)
        born = [block for block in blocks if block.lower == at]
        for block in born:
            assert memory.is_inside
            alive[block.id] = memory.pool.request(block.size_bytes)
            found[block.id] = alive[block.id].address - memory.base
    return {"places": found, "alive": alive}


@settings(max_examples=60)
@given(blocks=steps(), seed=st.integers(0, 999))
def test_requests_find_their_places_step_after_step(blocks: list[Block], seed: int) -> None:
    draw, script = random.Random(seed), script_of(blocks)
    placement, made = memories()
    for _ in range(3):
        step = placement.begin(script)
        places = run(step, blocks, made[0], draw)["places"]
        placement.end(step)
        for at in {block.lower for block in blocks}:  # those alike may change places
            born = [block for block in blocks if block.lower == at]
            assert {places[b.id] for b in born} == {script.places[b.id] for b in born}
    report = placement.report
    assert (report.exact_steps, report.fallbacks, report.layouts) == (3, 0, 1)
    assert made[0].pool.reserved == max(script.height_bytes, LEAST_BYTES)
    assert len(made) == 1 and len(made[0].pool.segments) == 1
    assert not made[0].is_inside


@settings(max_examples=60)
@given(planned=steps(), real=steps(), seed=st.integers(0, 999))
def test_a_step_that_differs_lies_elsewhere_and_is_counted(
    planned: list[Block], real: list[Block], seed: int
) -> None:
    """Other sizes, more and fewer requests, late frees, blocks that outlive their step."""
    draw, script = random.Random(seed), script_of(planned)
    placement, made = memories()
    kept: list[Any] = []
    known = {block.lower for block in planned}
    real = [block for block in real if block.lower in known]
    for _ in range(3):
        step = placement.begin(script)
        kept += run(step, real, made[-1], draw, late=0.3)["alive"].values()
        placement.end(step)
        for memory in made:
            own = [b.address for b in kept if b.pool is memory.pool]
            spans = sorted((address, size_at(memory, address)) for address in own)
            assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
        draw.shuffle(kept)
        del kept[len(kept) // 2 :]
    report = placement.report
    assert report.steps == 3 and report.exact_steps + report.fallbacks >= 3
    kept.clear()
    step = placement.begin(script)  # nothing is left over: all is as at first
    run(step, planned, made[-1], draw)
    placement.end(step)
    assert placement.report.exact_steps == report.exact_steps + 1


def size_at(memory: FakeArenaMemory, address: int) -> int:
    return next(s.size for seg in memory.pool.segments for s in seg if s.address == address)


def two_blocks() -> Script:
    return script_of([Block(0, 0, 4, 6 * MIB), Block(1, 2, 6, 30 * MIB)])


def test_a_step_during_one_that_awaits_its_backward_is_placed_elsewhere() -> None:
    placement, made = memories()
    first = placement.begin(two_blocks())
    first.turn(0)
    second = placement.begin(two_blocks())
    placed = made[0].placed
    second.turn(0)
    assert made[0].placed == placed and not second.is_exact
    placement.end(second)
    first.turn(1)
    placement.end(first)
    assert placement.report.exact_steps == 1 and placement.report.steps == 2
    again = placement.begin(two_blocks())
    del again  # its backward will never run
    assert placement.begin(two_blocks()).is_exact


@pytest.mark.parametrize(
    ("requested", "says"),
    [((4 * MIB, 30 * MIB), {0}), ((3 * MIB + 512, 4 * MIB), {0}), ((4 * MIB, 6 * MIB), set())],
    ids=["larger than planned", "a smaller piece first", "as planned"],
)
def test_a_growing_step_names_the_instruction_whose_requests_have_no_room(
    requested: tuple[int, ...], says: set[int]
) -> None:
    """An output that stays, and what a library takes for a moment, perhaps in other pieces."""
    script = script_of([Block(0, 0, 9, 4 * MIB), Block(1, 0, 1, 6 * MIB), Block(2, 2, 9, 5 * MIB)])
    placement, made = memories()
    step = placement.begin(script, notes_growth=True)
    step.turn(0)
    held = [made[0].pool.request(size) for size in requested]
    held.pop(0 if requested[0] < 4 * MIB else 1)
    step.turn(1)
    held.append(made[0].pool.request(5 * MIB))
    held.clear()
    placement.end(step)
    assert step.crowded == says


def test_what_outlives_a_step_is_seen_when_the_next_one_begins() -> None:
    placement, made = memories()
    step = placement.begin(two_blocks())
    step.turn(0)
    kept = made[0].pool.request(6 * MIB)
    placement.end(step)
    assert not placement.outlived
    assert not placement.begin(two_blocks()).is_exact
    assert placement.outlived and kept.address == made[0].base + two_blocks().places[0]


def test_a_higher_script_takes_higher_memory_and_a_lower_one_stays() -> None:
    placement, made = memories()
    low, high = two_blocks(), script_of([Block(0, 0, 2, 80 * MIB)])
    for script in (low, high, low):
        step = placement.begin(script)
        assert step.is_exact
        placement.end(step)
    assert [memory.height_bytes for memory in made] == [36 * MIB, 80 * MIB]
    assert high.height_bytes % CELL_BYTES == 0


def test_without_room_for_the_arena_steps_lie_elsewhere() -> None:
    def no_room(height: int) -> FakeArenaMemory:
        raise RuntimeError("out of memory")

    placement = FillerPlacement(no_room)
    step = placement.begin(two_blocks())
    step.turn(0)
    placement.end(step)
    assert placement.report.steps == 1 and placement.report.exact_steps == 0


@pytest.mark.parametrize("is_filled", [True, False])
def test_instructions_whose_requests_lie_elsewhere_leave_the_arena(is_filled: bool) -> None:
    script = script_of([Block(0, 0, 6, 6 * MIB), Block(1, 4, 6, 8 * MIB)], outside_at=(1,))
    placement, made = memories()
    kept = FakeArenaMemory(20 * MIB)
    step = placement.begin(script)
    if not is_filled:
        placement.end(step)
        kept = made[0].pool.request(2 * MIB)
        step = placement.begin(script)
    seen = []
    for instruction in (0, 1, 2):
        step.turn(instruction)
        seen.append(made[0].is_inside)
    step.pause()
    assert seen == [True, False, True] and not made[0].is_inside and kept is not None


def led(blocks: list[Block], steps: int, seed: int) -> None:
    """Lead steps and compare every place."""
    draw, script = random.Random(seed), script_of(blocks)
    placement, made = memories()
    for _ in range(steps):
        step = placement.begin(script)
        places = run(step, blocks, made[0], draw)["places"]
        placement.end(step)
        for at in {block.lower for block in blocks}:
            born = [block for block in blocks if block.lower == at]
            assert {places[b.id] for b in born} == {script.places[b.id] for b in born}
    assert placement.report.exact_steps == steps and len(made[0].pool.segments) == 1
    assert made[0].pool.reserved == max(script.height_bytes, LEAST_BYTES)


def test_every_request_of_a_thousand_random_layouts_finds_its_place() -> None:
    """Of up to sixty blocks, from a little more than is small to hundreds of megabytes."""
    draw = random.Random(0)
    for seed in range(1000):
        instructions = draw.randint(1, 24)
        blocks: list[Block] = []
        for at in range(instructions):
            for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
                size = round(SMALL_BYTES * draw.choice([1.001, 2, 2.5, 7, 33]) * draw.uniform(1, 3))
                blocks.append(Block(len(blocks), 2 * at, 2 * at + draw.randint(1, 12), size))
        if blocks:
            led(blocks, 2, seed)


PLANS = sorted((Path(__file__).parents[2] / "plans").glob("*.json.gz"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("file", PLANS, ids=lambda file: file.name.partition(".")[0])
def test_every_request_of_the_zoos_plans_finds_its_place(file: Path) -> None:
    """With every block sixteen times as large, so that the step is one of a GPU."""
    found = load_shared(file)
    made_with = found.made_with.rpartition(" ")[2].partition("+")[0]
    if made_with != torch.__version__.partition("+")[0]:
        pytest.skip(f"the plans were made of what PyTorch {made_with} traces")
    graph = graph_of(f"zoo:{file.name.partition('.')[0]}")
    plan = found.plans[len(found.plans) // 2].outcome.plan
    assert plan is not None
    lives = [x for x in lives_of(graph, plan) if x.content != "outside" and x.op is not None]
    lives.sort(key=lambda x: (x.lower, x.value is None, x.value))
    large = [x for x in lives if 16 * x.size_bytes > SMALL_BYTES]
    led([Block(n, x.lower, x.upper, 16 * x.size_bytes) for n, x in enumerate(large)], 2, 0)


def test_an_allocator_that_can_be_led_is_told_from_one_that_cannot() -> None:
    """Segments that grow are divided to the last bytes: what is left of a block is in the way."""
    assert placing_obstacle(FakeArenaMemory) is None
    reason = placing_obstacle(lambda height: FakeArenaMemory(height, 512))
    assert reason is not None and "is not placed" in reason

    def no_room(height: int) -> FakeArenaMemory:
        raise RuntimeError("out of memory")

    assert placing_obstacle(no_room) == "out of memory"
