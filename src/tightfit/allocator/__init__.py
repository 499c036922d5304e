"""Allocated bytes of PyTorch's allocators: meters, peaks, recorded lifetimes, bytes of tensors.

In: a device, a call or tensors. Out: bytes, as the device's allocator rounds them. May import
torch_private. On the CPU everything rests on the allocator hook (`hook_available`,
`hook_unavailable_reason`); without it `meter_for("cpu")`, `CpuMeter` and `record` raise
`HookUnavailable`, while `measure_peak` and `ProfilerMeter` still work. On CUDA no hook is needed.
Importing this package does not import torch.
"""

from tightfit.allocator.hook import hook_available, hook_unavailable_reason
from tightfit.allocator.meter import (
    CpuMeter,
    CudaMeter,
    Meter,
    PeakMeasurement,
    anonymous_bytes,
    code_bytes,
    cuda_requests,
    measure_peak,
    meter_for,
    own_meter_for,
    resident_bytes,
)
from tightfit.allocator.profiler_meter import ProfilerMeter
from tightfit.allocator.recording import RecordedBlock, Recorder, Recording, record

__all__ = [
    "CpuMeter",
    "CudaMeter",
    "Meter",
    "PeakMeasurement",
    "ProfilerMeter",
    "RecordedBlock",
    "Recorder",
    "Recording",
    "anonymous_bytes",
    "code_bytes",
    "cuda_requests",
    "hook_available",
    "hook_unavailable_reason",
    "measure_peak",
    "meter_for",
    "own_meter_for",
    "record",
    "resident_bytes",
]
