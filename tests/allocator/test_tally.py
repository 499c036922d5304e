"""Tallies: what was allocated since a moment, and the limit it keeps to."""

from __future__ import annotations

import threading

import pytest
import torch

from tightfit.allocator import CpuMeter
from tightfit.allocator import tally as tallies
from tightfit.allocator.refusals import budget_exceeded, is_refusal, unless_refused
from tightfit.allocator.tally import (
    CpuTally,
    describe_before_refusals,
    free_before_refusals,
    tally_for,
)

MIB = 1 << 20


def floats(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes // 4)


def test_it_counts_what_came_since_and_still_lives() -> None:
    before = floats(MIB)
    tally = CpuTally()
    after, more = floats(MIB), floats(2 * MIB)
    assert tally.allocated_bytes() == 3 * MIB
    assert tally.counted_bytes([before, after, after[:7], None]) == MIB
    del before, more
    assert tally.allocated_bytes() == MIB


def test_a_request_beyond_the_limit_is_refused_before_it_is_given() -> None:
    tally = CpuTally()
    held = floats(MIB)
    tally.set_limit(3 * MIB, before_bytes=MIB)
    fits = floats(MIB)
    with pytest.raises(RuntimeError) as refused:
        floats(64)
    assert is_refusal(refused.value)
    error = budget_exceeded(refused.value, "A test was refused.")
    more = 3 * MIB // 8  # what would be asked for next is not known
    assert (error.budget_bytes, error.measured_bytes) == (3 * MIB, 3 * MIB + 64 + more)
    assert f"Try a budget of {error.measured_bytes} bytes" in str(error)
    error = budget_exceeded(refused.value, "A test was refused.", further_bytes=100)
    assert error.measured_bytes == 3 * MIB + 164
    assert "try a budget" not in str(error)
    assert tally.refusals().count == 1 and tally.allocated_bytes() == 2 * MIB
    tally.set_limit(None, 0)
    assert floats(8 * MIB).nbytes == 8 * MIB
    del held, fits


def test_what_can_be_made_again_is_freed_before_anything_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, lacking = [floats(MIB), floats(MIB)], list[int]()

    def free(lacking_bytes: int, device: torch.device) -> int:
        assert device == torch.device("cpu")
        lacking.append(lacking_bytes)
        return kept.pop().nbytes if kept else 0

    monkeypatch.setattr(tallies, "_FREEING", [])
    tally = CpuTally()
    kept[:] = [floats(MIB), floats(MIB)]
    tally.set_limit(2 * MIB + 64, 0)
    assert unless_refused(lambda: floats(MIB)) is None  # it is optional
    assert not lacking
    free_before_refusals(free)
    assert unless_refused(lambda: floats(MIB)) is None
    assert not lacking and len(kept) == 2
    assert floats(MIB).nbytes == MIB
    assert lacking == [MIB - 64] and len(kept) == 1


def test_a_refusal_is_described_once_nothing_more_can_be_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, described = [floats(MIB)], list[tuple[int, bool]]()
    monkeypatch.setattr(tallies, "_FREEING", [])
    monkeypatch.setattr(tallies, "_DESCRIBING", [])
    describe_before_refusals(lambda *given: described.append(given))
    free_before_refusals(lambda lacking_bytes, device: kept.pop().nbytes if kept else 0)
    tally = CpuTally()
    tally.set_limit(2 * MIB, 0)
    held = floats(2 * MIB)
    assert unless_refused(lambda: floats(MIB)) is None
    assert described == [(MIB, True)] and len(kept) == 1  # its error is not read
    with pytest.raises(RuntimeError):
        floats(2 * MIB)
    assert described[1:] == [(MIB, False)] and not kept
    del held


def test_garbage_is_collected_before_anything_is_refused() -> None:
    class Holder:
        def __init__(self) -> None:
            self.own, self.tensor = self, floats(2 * MIB)

    tally = CpuTally()
    Holder()
    tally.set_limit(3 * MIB, 0)
    assert floats(2 * MIB).nbytes == 2 * MIB
    assert not tally.refusals().count


def test_threads_together_never_exceed_the_limit() -> None:
    tally = CpuTally()
    limit = 64 * 1024
    tally.set_limit(limit, 0)
    meter = CpuMeter()
    start = meter.live_bytes()

    def allocate() -> None:
        for _ in range(300):
            try:
                kept = [floats(4096) for _ in range(4)]
                del kept
            except RuntimeError as error:
                assert is_refusal(error)

    threads = [threading.Thread(target=allocate) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.peak_bytes() - start <= limit
    assert tally.allocated_bytes() == 0


def test_room_is_made_before_a_request_is_refused() -> None:
    tally, held = CpuTally(), [floats(MIB)]
    lacking: list[int] = []

    def free(lacking_bytes: int) -> bool:
        lacking.append(lacking_bytes)
        return bool(held) and held.pop() is not None

    tally.set_limit(2 * MIB, before_bytes=MIB)
    tally.make_room_by(free)
    held.append(floats(MIB))
    held.append(floats(MIB))
    assert (
        lacking == [MIB, MIB] and tally.allocated_bytes() == MIB and tally.take_peak_bytes() == MIB
    )
    with pytest.raises(RuntimeError, match="has no room"):
        floats(2 * MIB)
    assert len(lacking) == 4 and not held
    tally.make_room_by(None)
    with pytest.raises(RuntimeError, match="has no room"):
        floats(2 * MIB)
    assert len(lacking) == 4


def test_places_of_what_nobody_uses_are_free_again(capsys: pytest.CaptureFixture[str]) -> None:
    class Holder:
        def __init__(self) -> None:
            self.own, self.tally = self, tally_for(torch.device("cpu"), [])

    for _ in range(100):
        assert Holder().tally is not None
    assert not capsys.readouterr().err
    held = [tally_for(torch.device("cpu"), []) for _ in range(100)]
    assert held[0] is not None and held[-1] is None
    assert "64 fitted models exist" in capsys.readouterr().err
