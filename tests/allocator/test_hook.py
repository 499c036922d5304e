"""The allocator hook counts exactly, under everything that may free or allocate around it."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch import nn

from support.memory import held_pages
from tightfit.allocator import (
    CpuMeter,
    ProfilerMeter,
    hook_available,
    hook_unavailable_reason,
    measure_peak,
    meter_for,
    record,
    resident_bytes,
)
from tightfit.errors import BadInput, HookUnavailable

KIB = 1024


def grown_by(function) -> tuple[int, int]:
    """Return (growth, peak above the start) of a call whose result is kept until it is read."""
    gc.collect()
    kept, measurement = measure_peak(function)
    del kept
    return measurement.growth_bytes, measurement.peak_bytes


def test_the_hook_is_installed_here():
    assert hook_unavailable_reason() is None
    assert hook_available()


def test_counts_are_exact_and_rounded_to_64_bytes():
    assert grown_by(lambda: torch.empty(1000)) == (4032, 4032)
    assert grown_by(lambda: torch.empty(1, dtype=torch.uint8)) == (64, 64)
    assert grown_by(lambda: torch.empty(0)) == (0, 0)
    assert grown_by(lambda: torch.empty(64 * KIB).view(-1)[::2]) == (256 * KIB, 256 * KIB)


def test_peak_is_the_highest_level_since_the_reset():
    meter = CpuMeter()
    start = meter.live_bytes()
    meter.reset_peak()
    first = torch.empty(KIB)
    second = torch.empty(2 * KIB)
    del first
    third = torch.empty(KIB)
    assert meter.peak_bytes() - start == 12 * KIB
    del second, third
    assert meter.live_bytes() == start
    meter.reset_peak()
    assert meter.peak_bytes() == start


def test_every_meter_has_its_own_peak():
    outer, inner = CpuMeter(), CpuMeter()
    start = outer.live_bytes()
    high = torch.empty(4 * KIB)
    del high
    inner.reset_peak()
    _, nested = measure_peak(lambda: torch.empty(KIB))
    assert nested.peak_bytes == 4 * KIB
    assert inner.peak_bytes() - start == 4 * KIB
    assert outer.peak_bytes() - start == 16 * KIB


def test_meters_that_are_gone_make_room():
    meters = [CpuMeter() for _ in range(1000)]
    first = meters[0]
    first.reset_peak()
    start = first.live_bytes()
    del meters
    gc.collect()
    more = [CpuMeter() for _ in range(1000)]
    torch.empty(KIB)
    assert {meter.peak_bytes() - start for meter in [first, *more]} == {4 * KIB}
    with pytest.raises(HookUnavailable, match="1024 meters"):
        more += [CpuMeter() for _ in range(100)]


class OnePeak:
    """The part of torch.cuda that a meter uses, with levels set by hand."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def set(self, live: int) -> None:
        self.live = live
        self.peak = max(self.peak, live)

    def reset(self, index: int) -> None:
        self.peak = self.live

    def statistics(self, index: int) -> dict[str, int]:
        name = "requested_bytes.all"
        return {f"{name}.current": self.live, f"{name}.peak": self.peak}

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
        monkeypatch.setattr(torch.cuda, "memory_stats", self.statistics)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)


def test_every_cuda_meter_has_its_own_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's only peak is shared out; checked here without a GPU."""
    device = OnePeak()
    device.patch(monkeypatch)
    device.set(1000)
    outer = meter_for("cuda:0")
    device.set(5000)
    device.set(2000)
    inner = meter_for("cuda:0")
    assert (outer.peak_bytes(), inner.peak_bytes()) == (5000, 2000)
    device.set(3000)
    device.set(500)
    inner.reset_peak()
    device.set(700)
    assert (outer.peak_bytes(), inner.peak_bytes()) == (5000, 700)
    outer.reset_peak()
    device.set(600)
    assert (outer.peak_bytes(), inner.peak_bytes()) == (700, 700)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_onednn_operators_work_and_free_everything(dtype):
    """Their raw buffers need the context of a block to be its data pointer."""
    meter = CpuMeter()

    def train():
        convolution = nn.Conv2d(3, 16, 3).to(dtype)
        convolution(torch.randn(4, 3, 40, 40, dtype=dtype)).float().square().mean().backward()
        linear = nn.Linear(64, 32).to(dtype)
        linear(torch.randn(8, 64, dtype=dtype)).float().square().mean().backward()
        recurrent = nn.LSTM(8, 16, batch_first=True).to(dtype)
        recurrent(torch.randn(4, 6, 8, dtype=dtype))[0].float().square().mean().backward()

    train()
    gc.collect()
    before = meter.live_bytes()
    train()
    gc.collect()
    assert meter.live_bytes() == before


def test_threads_count_into_the_same_figures():
    meter = CpuMeter()
    before = meter.live_bytes()
    kept: list[torch.Tensor] = []

    def allocate_and_free() -> None:
        for size in range(1, 2000):
            torch.empty(size)
        kept.append(torch.empty(KIB))

    threads = [threading.Thread(target=allocate_and_free) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.live_bytes() - before == 4 * 4 * KIB
    kept.clear()
    assert meter.live_bytes() == before


def test_profiler_route_agrees_with_the_hook():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 900, 10))
    images = torch.randn(4, 3, 32, 32)

    def step() -> torch.Tensor:
        output = model(images)
        output.sum().backward()
        model.zero_grad()
        return output

    step()
    _, counted = measure_peak(step)
    with ProfilerMeter() as profiler:
        output = step()
    assert profiler.peak_bytes() == counted.peak_bytes
    assert profiler.live_bytes() == counted.growth_bytes == 192
    del output
    with pytest.raises(RuntimeError, match="after its 'with' block"):
        ProfilerMeter().peak_bytes()


def test_meter_refuses_other_devices():
    with pytest.raises(BadInput, match="not on 'meta'"):
        meter_for("meta")


def test_held_bytes_are_the_resident_memory():
    held = resident_bytes()
    touched = held_pages(64 * KIB * KIB)
    assert CpuMeter().held_bytes() >= held + len(touched) // 2


def test_recorded_lifetimes():
    assert hook_available()  # installed by now: blocks from before it are never counted
    older = torch.empty(10)
    with record() as recorder:
        first = torch.empty(100)
        second = torch.empty(1, dtype=torch.uint8)
        del first, older
        worker = threading.Thread(target=lambda: torch.empty(25))
        worker.start()
        worker.join()
        with pytest.raises(RuntimeError, match="cannot be nested"), record():
            pass
        with pytest.raises(RuntimeError, match="after its 'with' block"):
            _ = recorder.recording
    recording = recorder.recording
    assert recording.blocks == ((0, 1, 3, 400, 0), (1, 2, 6, 1, 0), (2, 4, 5, 100, 1))
    assert recording.last_tick == 6
    assert recording.frees_of_older_blocks == 1
    del second
    with record() as empty:
        pass
    assert empty.recording.blocks == ()


def run_alone(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_memory_from_before_the_installation():
    """It is freed through the hook, never counted, and raw oneDNN buffers survive."""
    result = run_alone(
        """
        import torch
        from torch import nn
        convolution = nn.Conv2d(3, 8, 3)
        recurrent = nn.LSTM(8, 16)
        sequence = torch.randn(5, 2, 8, requires_grad=True)
        old = [torch.randn(1000) for _ in range(50)]
        images = torch.randn(2, 3, 16, 16)
        output = convolution(images)
        hidden = recurrent(sequence)[0]

        from tightfit.allocator import CpuMeter
        meter = CpuMeter()
        assert meter.live_bytes() == 0
        output.sum().backward()
        hidden.sum().backward()
        convolution(images)
        assert meter.live_bytes() > 0
        convolution.zero_grad()
        recurrent.zero_grad()
        sequence.grad = None
        del old, output, hidden, images
        assert meter.live_bytes() == 0, meter.live_bytes()
        """
    )
    assert result.returncode == 0, result.stderr


def test_a_forked_child_goes_on_counting():
    result = run_alone(
        """
        import os, threading, time
        import torch
        from tightfit.allocator import CpuMeter, record
        torch.set_num_threads(1)
        meter = CpuMeter()
        stop = False
        def busy():
            while not stop:
                torch.empty(1000)
        torch.empty(8)  # a child waits for ever for what PyTorch was setting up at its first call
        worker = threading.Thread(target=busy)
        worker.start()
        with record():
            for _ in range(50):
                child = os.fork()
                if child == 0:
                    before = meter.live_bytes()
                    kept = torch.empty(64)
                    grown = meter.live_bytes() - before
                    with record() as recorder:
                        torch.empty(8)
                    os._exit(0 if grown == 256 and len(recorder.recording.blocks) == 1 else 1)
                assert os.waitpid(child, 0)[1] == 0
        stop = True
        worker.join()
        """
    )
    assert result.returncode == 0, result.stderr


def test_another_allocator_is_refused_by_name(monkeypatch):
    """Where the hook cannot be installed, the error says why and what still works."""
    from tightfit.allocator import hook, meter

    monkeypatch.setattr(hook, "_install", lambda: (None, "the vtable has another length"))
    monkeypatch.setattr(meter, "hook_available", lambda: False)
    with pytest.raises(HookUnavailable, match=r"another length.*measure_peak"):
        meter_for("cpu")
    kept, measurement = measure_peak(lambda: torch.empty(1000))
    assert measurement.peak_bytes == measurement.growth_bytes == 4032
    assert kept.numel() == 1000


def test_importing_the_allocator_does_not_import_torch():
    result = run_alone("import sys, tightfit.allocator; assert 'torch' not in sys.modules")
    assert result.returncode == 0, result.stderr
