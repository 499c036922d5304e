"""The roofline of this CPU, measured once and kept in the cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tightfit.costs.cache import Cache
from tightfit.costs.machines import Machine
from tightfit.costs.measured.call import cpu_name, environment_of

_KEY = "peaks of this CPU"


def this_cpu() -> Machine:
    """Return this CPU at torch's present number of threads, from the cache if it is known."""
    cache = Cache(environment_of("cpu"))
    machine = cache.get(_KEY, Machine)
    if machine is None:
        machine = measure_this_cpu()
        cache.put(_KEY, machine)
        cache.save()
    return machine


def measure_this_cpu() -> Machine:
    """Return this CPU's reachable rates per second of CPU time, from four small kernels."""
    large = torch.ones(16 << 20)
    copied = torch.empty_like(large)
    matrix = torch.rand(1024, 1024)
    images, filters = torch.rand(4, 64, 56, 56), torch.rand(64, 64, 3, 3)
    tiny = torch.ones(1)
    with torch.no_grad():
        return Machine(
            name=f"{cpu_name()}, threads: {torch.get_num_threads()}",
            bytes_per_s=2 * large.nbytes / _seconds(lambda: copied.copy_(large)),
            convolution_flops_per_s=2
            * images.numel()
            * 64
            * 9
            / _seconds(lambda: F.conv2d(images, filters, padding=1)),
            matrix_flops_per_s=2 * 1024**3 / _seconds(lambda: matrix @ matrix),
            launch_s=_seconds(lambda: [tiny + tiny for _ in range(200)]) / 200,
            granularity_bytes=64,
            source="measured on this machine: copy, 3x3 convolution, matrix product, tiny sum",
        )


def _seconds(call: Callable[[], Any], repeats: int = 7) -> float:
    """Return the median CPU time of a call, over all threads, as `measure_call` counts it."""
    call()
    samples: list[float] = []
    for _ in range(repeats):
        begin = time.process_time()
        call()
        samples.append(time.process_time() - begin)
    return max(statistics.median(samples), 1e-9)
