"""What differs from device to device besides its memory: generators and clocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that operators on a device draw from if they are given none."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def get_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def fixed_generators(device: torch.device) -> AbstractContextManager[None]:
    """Return a context after which the generators of the CPU and of a device are as before."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Call a function; return its seconds, of the processor or, on a GPU, of the device."""
    if device.type != "cuda":
        began = time.process_time()
        run()
        return time.process_time() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    start.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end) / 1e3
