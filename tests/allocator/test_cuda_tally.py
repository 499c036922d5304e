"""A budget as PyTorch's own limit of a GPU, tried with a stand-in for torch.cuda."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from tightfit.allocator.cuda_tally import CudaTally
from tightfit.allocator.refusal_details import RefusalDetails
from tightfit.allocator.refusals import budget_exceeded, is_refusal, refused_bytes, unless_refused
from tightfit.torch_private.gpu import allocator_settings

MIB = 1 << 20
GIB = 1 << 30
TOTAL = 80 * GIB
TEXT = (
    "CUDA out of memory. Tried to allocate 392.00 MiB. GPU 0 has a total capacity of 80.00 GiB of "
    "which 60.00 GiB is free. 4.50 GiB allowed; Of the allocated memory 3.60 GiB is allocated by "
    "PyTorch, and 978.00 MiB is reserved by PyTorch but unallocated."
)
DEVICE = torch.device("cuda:0")


class Device:
    """The part of torch.cuda that a limit uses, with levels set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live = self.reserved = 0
        self.fraction = 1.0
        self.settings: list[str] = []
        for name, value in {
            "get_allocator_backend": lambda: "native",
            "memory_stats": self.statistics,
            "memory_reserved": lambda index: self.reserved,
            "get_per_process_memory_fraction": lambda index: self.fraction,
            "set_per_process_memory_fraction": self.set_fraction,
            "get_device_properties": lambda index: SimpleNamespace(total_memory=TOTAL),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)
        for key, value in {"may expand": True, "expand": False}.items():
            monkeypatch.setitem(allocator_settings._ours, key, value)
        monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", self.get_settings)
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", self.settings.append)

    def statistics(self, index: int) -> dict[str, int]:
        name = "requested_bytes.all"
        return {f"{name}.current": self.live, f"{name}.peak": self.live}

    def set_fraction(self, fraction: float, index: int) -> None:
        assert 0 <= fraction <= 1
        self.fraction = fraction

    def get_settings(self) -> str:
        return self.settings[-1] if self.settings else ""

    @property
    def allowed_bytes(self) -> int:
        return int(self.fraction * TOTAL)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    gc.collect()
    return Device(monkeypatch)


def test_the_limit_is_the_budget_and_what_others_had_reserved(device: Device) -> None:
    device.live, device.reserved = 3 * GIB, 4 * GIB
    tally = CudaTally(DEVICE, [])
    tally.set_limit(8 * GIB, 2 * GIB)  # of what was there, 2 GiB are the model's own
    assert device.allowed_bytes == 8 * GIB + 2 * GIB
    tally.set_limit(None, 0)
    assert device.fraction == 1.0


def test_of_several_the_least_holds_and_none_is_above_the_users_own(device: Device) -> None:
    device.fraction = 0.5
    first, second = CudaTally(DEVICE, []), CudaTally(DEVICE, [])
    first.set_limit(8 * GIB, 0)
    second.set_limit(6 * GIB + 1, 0)
    assert device.allowed_bytes == 6 * GIB + 1
    second.set_limit(None, 0)
    assert device.allowed_bytes == 8 * GIB
    first.set_limit(60 * GIB, 0)
    assert device.fraction == 0.5
    first.set_limit(None, 0)
    assert device.fraction == 0.5


@pytest.mark.parametrize("limit_gib", [1, 7, 33, 79])
def test_the_limit_is_exact_to_the_byte(device: Device, limit_gib: int) -> None:
    tally = CudaTally(DEVICE, [])
    for limit in (limit_gib * GIB, limit_gib * GIB - 1, limit_gib * GIB + 12345):
        tally.set_limit(limit, 0)
        assert device.allowed_bytes == limit


def test_segments_grow_unless_the_user_has_decided(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.8")
    CudaTally(DEVICE, []).set_limit(GIB, 0)
    assert device.settings == ["garbage_collection_threshold:0.8,expandable_segments:True"]
    CudaTally(DEVICE, []).set_limit(GIB, 0)
    assert len(device.settings) == 1
    device.settings = ["expandable_segments:False"]
    assert not allocator_settings.expand_segments()
    device.settings = []
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert not allocator_settings.expand_segments()


def test_an_arena_keeps_segments_as_they_are(device: Device) -> None:
    CudaTally(DEVICE, []).set_limit(GIB, 0)
    assert device.settings[-1] == "expandable_segments:True"
    allocator_settings.divide_coarsely()
    assert device.settings[-1] == "expandable_segments:False"
    CudaTally(DEVICE, []).set_limit(GIB, 0)
    assert device.settings[-1] == "expandable_segments:False"


def test_an_arena_leaves_what_the_user_has_decided(device: Device) -> None:
    device.settings = ["expandable_segments:True"]
    allocator_settings.divide_coarsely()
    assert device.settings == ["expandable_segments:True"]


def test_what_the_device_refuses_is_said_in_terms_of_the_budget(device: Device) -> None:
    error = torch.OutOfMemoryError(TEXT)
    assert not is_refusal(error)  # no limit was asked for
    tally = CudaTally(DEVICE, [])
    device.live, device.reserved = round(3.6 * GIB), round(4.5 * GIB)
    tally.set_limit(5 * GIB, GIB)
    assert is_refusal(error) and not is_refusal(RuntimeError("another one"))
    assert not is_refusal(torch.OutOfMemoryError(TEXT.replace("GPU 0", "GPU 1")))
    assert refused_bytes(error) == (5 * GIB, 392 * MIB, device.live + GIB)
    exceeded = budget_exceeded(error, "The backward was stopped.")
    assert exceeded.budget_bytes == 5 * GIB and exceeded.measured_bytes > 4 * GIB
    assert "The backward was stopped. tightfit: the budget of" in str(exceeded)
    assert "921.60 MiB reserved and not allocated" in str(exceeded)
    tally.describe_refusals(RefusalDetails(budget_bytes=20 * GIB))
    assert budget_exceeded(error, "").measured_bytes == 20 * GIB

    def refused() -> None:
        raise error

    assert unless_refused(refused) is None
    tally.set_limit(None, 0)
    with pytest.raises(torch.OutOfMemoryError):
        unless_refused(refused)


def test_a_tally_that_is_let_go_of_limits_nothing(device: Device) -> None:
    tally = CudaTally(DEVICE, [])
    tally.set_limit(GIB, 0)
    other = CudaTally(DEVICE, [])
    other.set_limit(2 * GIB, 0)
    assert device.allowed_bytes == GIB
    del tally
    gc.collect()
    assert device.allowed_bytes == 2 * GIB
    del other
    gc.collect()
    assert device.fraction == 1.0
