"""Moves executed: bits, peaks, and what happens where far memory fails during a step."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.far_steps import Step, check_peak, one_move, random_moves, step_of
from support.models import EXECUTED
from tightfit.errors import BadInput, OffloadFailed
from tightfit.execution.far import copier
from tightfit.execution.far.file import FileStep
from tightfit.execution.far.offload import Offload
from tightfit.plan import Plan
from tightfit.plan.simulate import simulate


@pytest.mark.parametrize("name", EXECUTED)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data(), seed=st.integers(0, 1 << 20))
def test_moves_change_no_bits_and_peaks_are_the_simulated_ones(
    name: str, data: st.DataObject, seed: int
) -> None:
    step = step_of(name)
    plain, plan = random_moves(step, data, seed)
    expected, _, _ = step.run(plain)
    step.run(plan)  # the first run loads kernels and their caches
    found, rise, moved = step.run(plan)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    check_peak(step, plan, rise, moved)
    if moved is not None:
        assert moved.far_bytes <= simulate(step.graph, plan).far_peak_bytes
    assert not copying_threads()


def copying_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("tightfit far")]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def moving() -> Iterator[tuple[Step, Plan]]:
    """A step, and a plan of it that stores a value in the forward and loads it in the backward."""
    step = step_of("batch norm")
    plan = one_move(step)
    files = open_files()
    yield step, plan
    assert not copying_threads()
    assert open_files() <= files


def test_a_full_disk_ends_the_step(
    moving: tuple[Step, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, plan = moving
    before = [p.clone() for p in step.model.parameters()]
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, old[1]))
    try:
        with pytest.raises(OffloadFailed, match=r"File too large\) after .*Way out"):
            step.run(plan)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert all(map(torch.equal, before, step.model.parameters()))
    step.run(plan)


def test_a_file_that_ends_early_is_seen(
    moving: tuple[Step, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, plan = moving
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(OffloadFailed, match="the file is shorter"):
        step.run(plan)


def test_an_error_in_a_copying_thread_ends_the_step(
    moving: tuple[Step, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, plan = moving

    def dies(*_: Any) -> int:
        raise SystemExit

    monkeypatch.setattr(os, "pwrite", dies)
    with pytest.raises(OffloadFailed, match="SystemExit"):
        step.run(plan)


def test_a_copying_thread_that_has_ended_is_noticed(
    moving: tuple[Step, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, plan = moving
    monkeypatch.setattr(copier, "_LOOKS_S", 0.05)
    monkeypatch.setattr(copier, "_serve", lambda *_: None)
    with pytest.raises(OffloadFailed, match="has ended during a step"):
        step.run(plan)


@pytest.mark.parametrize("direction", ["pwrite", "preadv"])
def test_ctrl_c_during_a_transfer_ends_it(
    moving: tuple[Step, Plan], monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    step, plan = moving
    copy: Callable[..., int] = getattr(os, direction)
    main = threading.main_thread().ident

    def slow(*given: Any) -> int:
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.2)
        return copy(*given)

    monkeypatch.setattr(os, direction, slow)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            step.run(plan)
    finally:
        signal.signal(signal.SIGINT, handler)
    monkeypatch.undo()
    step.run(plan)


def test_a_step_that_nobody_ends_leaves_nothing_behind() -> None:
    files = open_files()
    far = FileStep(Offload("1MiB"))
    far.store(0, torch.randn(64, 64))
    del far
    assert not copying_threads()
    assert open_files() <= files


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(5, 7).t(),
        torch.randn(9, 4)[2:, 1:3],
        torch.randn(3, 1, 4).expand(3, 5, 4),
        torch.randn(6).to(torch.bfloat16),
        torch.rand(7) > 0.5,
        torch.randn(4, dtype=torch.complex64),
        torch.tensor(3.5),
        torch.empty(0, 3),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype}",
)
def test_a_tensor_comes_back_as_it_was(tensor: torch.Tensor) -> None:
    far = FileStep(Offload("1MiB"))
    far.store(3, tensor)
    far.wait(3)
    back = far.load(3, is_last=True)
    far.wait(3)
    assert torch.equal(back, tensor) and back.dtype == tensor.dtype
    assert (back.stride(), back.storage_offset()) == (tensor.stride(), tensor.storage_offset())
    far.close()


def test_the_file_is_no_longer_than_what_lay_in_it_at_once() -> None:
    """What is freed is used again, in pieces where need be; nothing else is overwritten."""
    far, draw = FileStep(Offload(400)), random.Random(0)
    there: dict[int, torch.Tensor] = {}
    most = 0
    for number in range(200):
        size = draw.randint(1, 120)
        while sum(t.numel() for t in there.values()) + size > 400:
            value = draw.choice(sorted(there))
            back = far.load(value, is_last=True)
            far.wait(value)
            assert torch.equal(back, there.pop(value))
        there[number] = torch.randint(0, 255, (size,), dtype=torch.uint8)
        far.store(number, there[number])
        far.wait(number)
        most = max(most, sum(t.numel() for t in there.values()))
    assert far.moved().far_bytes == most
    with pytest.raises(OffloadFailed, match="more than its plan said"):
        far.store(1000, torch.zeros(401, dtype=torch.uint8))
    far.close()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="name another folder"):
        Offload("1GiB", folder=tmp_path / "nowhere")
    with pytest.raises(BadInput, match="offload"):
        Offload("many")


def test_the_link_is_measured_once_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tightfit.execution.far import links

    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path / "cache"))
    far = Offload("1GiB", folder=tmp_path).far()
    assert far.capacity_bytes == 1 << 30
    assert far.store_bytes_per_s > 1e6 and far.load_bytes_per_s > 1e6
    links.file_link.cache_clear()
    monkeypatch.setattr(links, "_measured_file", lambda folder: pytest.fail("measured again"))
    assert Offload("2GiB", folder=str(tmp_path)).far().load_bytes_per_s == far.load_bytes_per_s
