"""Moves as a GPU executes them, on the CPU: streams whose copies run as late as they may."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.far_steps import Step, check_peak, one_move, random_moves, step_of
from support.late_streams import ORDERS, LateStreams, WatchedStep, at_random, pinned_memory
from support.models import EXECUTED
from tightfit.errors import OffloadFailed
from tightfit.execution.far import pinned
from tightfit.execution.far.pinned import PinnedMemory, Waits
from tightfit.plan import Plan

orders = st.one_of(
    st.sampled_from(sorted(ORDERS.values(), key=str)), st.integers(0, 99).map(at_random)
)


@pytest.mark.parametrize("name", EXECUTED)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data(), seed=st.integers(0, 1 << 20), choose=orders)
def test_moves_change_no_bits_and_peaks_are_the_simulated_ones(
    name: str, data: st.DataObject, seed: int, choose: Callable[[int], int]
) -> None:
    step = step_of(name)
    plain, plan = random_moves(step, data, seed)
    expected, _, _ = step.run(plain)
    streams = LateStreams(choose)
    memory = pinned_memory(1 << 30, streams, 1 << 16)
    step.run(plan, lambda: WatchedStep(memory))  # the first run pins memory
    held_bytes = memory.pinned_bytes
    found, rise, moved = step.run(plan, lambda: WatchedStep(memory))
    streams.run_all()
    assert memory.pinned_bytes == held_bytes
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    check_peak(step, plan, rise, moved)


@pytest.fixture
def moving() -> tuple[Step, Plan]:
    step = step_of("batch norm")
    return step, one_move(step)


@pytest.mark.parametrize(
    ("waiting", "event"), [("stores", "operators"), ("loads", "operators"), ("operators", "stores")]
)
def test_a_wait_that_is_left_out_is_found(
    moving: tuple[Step, Plan], waiting: str, event: str
) -> None:
    step, plan = moving
    streams = LateStreams(ignored=[(waiting, event)])
    memory = pinned_memory(1 << 30, streams)
    with pytest.raises(AssertionError, match=r"a copy does not wait|memory was freed|in no order"):
        step.run(plan, lambda: WatchedStep(memory))
        streams.run_all()


def test_a_load_that_is_not_waited_for_is_found(moving: tuple[Step, Plan]) -> None:
    step, plan = moving
    memory = pinned_memory(1 << 30, LateStreams(ignored=[("operators", "loads")]))
    expected = step.run(plan)[0]
    found = step.run(plan, lambda: WatchedStep(memory))[0]
    assert not all(map(torch.equal, found, expected))


@pytest.mark.parametrize("choose", [*ORDERS.values(), at_random(0)])
def test_places_are_used_again_in_order_on_any_stream(choose: Callable[[int], int]) -> None:
    """Operators change their stream between steps, and the streams do not wait for each other."""
    streams, draw = LateStreams(choose), random.Random(0)
    memory = pinned_memory(4096, streams, 1024)
    for number in range(6):
        streams.now = f"operators {number % 2}"
        far = WatchedStep(memory)
        there: dict[int, torch.Tensor] = {}
        for value in range(40):
            size = draw.randint(1, 1400)
            while sum(512 * (1 + (t.numel() - 1) // 512) for t in there.values()) + size > 3500:
                _check_back(far, there, draw.choice(sorted(there)))
            there[value] = torch.randint(0, 255, (size,), dtype=torch.uint8)
            content = there[value].clone()
            far.store(value, content)
            far.wait(value)
            content.zero_()
        for value in list(there)[number % 2 :]:
            _check_back(far, there, value)
        far.close()
    assert memory.pinned_bytes == 4096


def _check_back(far: WatchedStep, there: dict[int, torch.Tensor], value: int) -> None:
    back = far.load(value, is_last=True)
    far.wait(value)
    assert torch.equal(back, there.pop(value))


def test_stores_wait_for_loads_of_a_step_on_another_stream() -> None:
    """The check of places sees it where nothing else orders the two."""
    streams = LateStreams(ignored=[("stores", "loads")])
    memory = pinned_memory(1 << 20, streams)
    with pytest.raises(AssertionError, match="in no order"):
        for name in ("one", "other"):
            streams.now = name
            far = WatchedStep(memory)
            content = torch.ones(100)
            far.store(0, content)
            far.wait(0)
            far.load(0, is_last=True)
            far.wait(0)
            far.close()


def test_a_tensor_comes_back_as_it_was() -> None:
    far = WatchedStep(pinned_memory(1 << 20, LateStreams(), 512))
    tensors = [
        torch.randn(9, 40)[2:, 1:3].t(),
        torch.randn(3, 1, 4).expand(3, 5, 4),
        torch.randn(600, dtype=torch.complex64),
        torch.rand(777) > 0.5,
        torch.empty(0, 3),
        torch.tensor(3.5),
    ]
    for value, tensor in enumerate(tensors):
        far.store(value, tensor)
        far.wait(value)
    for value, tensor in enumerate(tensors):
        back = far.load(value, is_last=True)
        far.wait(value)
        assert torch.equal(back, tensor) and back.dtype == tensor.dtype
        assert (back.stride(), back.storage_offset()) == (tensor.stride(), tensor.storage_offset())
    far.close()


@pytest.mark.parametrize("failing", [1, 3])
def test_a_step_that_fails_frees_nothing_too_early(moving: tuple[Step, Plan], failing: int) -> None:
    """The first copy of a store, and one of several; the next step is right."""
    step, plan = moving
    streams = LateStreams(refused_copy=failing)
    memory = pinned_memory(1 << 30, streams, 1 << 12)
    expected = step.run(plan)[0]
    with pytest.raises(RuntimeError, match="a copy that fails"):
        step.run(plan, lambda: WatchedStep(memory))
    streams.run_all()
    found = step.run(plan, lambda: WatchedStep(memory))[0]
    streams.run_all()
    assert all(map(torch.equal, found, expected))


def test_a_step_that_nobody_ends_gives_its_memory_back() -> None:
    streams = LateStreams()
    memory = pinned_memory(1 << 20, streams, 1 << 20)
    for _ in range(3):
        far = WatchedStep(memory)
        far.store(0, torch.randn(64, 64))  # whose memory the step holds
        loaded = torch.randn(64)
        far.store(1, loaded)
        far.wait(1)
        far.load(1)
        del far
        gc.collect()
        streams.run_all()
    assert memory.pinned_bytes == 1 << 20


def test_steps_at_the_same_time_share_no_memory() -> None:
    streams = LateStreams()
    memory = pinned_memory(1 << 20, streams)
    one, other = WatchedStep(memory), WatchedStep(memory)
    values = [torch.randn(3000), torch.randn(3000)]
    for far, tensor in zip((one, other), values, strict=True):
        far.store(0, tensor)
        far.wait(0)
    for far, tensor in zip((one, other), values, strict=True):
        back = far.load(0, is_last=True)
        far.wait(0)
        assert torch.equal(back, tensor)
        far.close()


def test_what_the_user_allows_is_the_most() -> None:
    memory = PinnedMemory(5000, LateStreams())
    assert memory.chunk_bytes == 8192
    assert PinnedMemory(1 << 40, LateStreams()).chunk_bytes == 32 << 20
    far = WatchedStep(memory)
    far.store(0, torch.zeros(4000, dtype=torch.uint8))
    with pytest.raises(OffloadFailed, match="more than its plan said"):
        far.store(1, torch.zeros(1000, dtype=torch.uint8))
    far.close()


def test_memory_that_cannot_be_pinned_ends_the_step(moving: tuple[Step, Plan]) -> None:
    step, plan = moving
    streams = LateStreams(can_pin=False)
    memory = pinned_memory(1 << 30, streams)
    with pytest.raises(OffloadFailed, match=r"out of memory\) after 0 B.*a smaller offload="):
        step.run(plan, lambda: WatchedStep(memory))
    streams.can_pin = True
    step.run(plan, lambda: WatchedStep(memory))


def test_waits_are_known_once_the_device_has_got_there(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[int, float] = {}

    def seconds(begin: Any, end: Any) -> float | None:
        return known.get(end)

    streams = LateStreams()
    monkeypatch.setattr(streams, "seconds", seconds)
    waits = Waits(streams)
    waits.end_step([(0, 1), (0, 2)])
    assert waits.last_s() == 0.0
    known[1] = 1.0
    assert waits.last_s() == 0.0
    known[2] = 2.0
    waits.end_step([(0, 3)])
    assert waits.last_s() == 3.0
    for _ in range(3 * pinned._MOST_PENDING):  # the device is far behind
        waits.end_step([(0, 4)])
    known |= {3: 5.0, 4: 4.0}
    assert waits.last_s() == 4.0
    waits.end_step([])
    assert waits.last_s() == 0.0
