"""Memory events of PyTorch's profiler. Private names of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._profiler import _EventType


def allocations(profile: torch.profiler.profile) -> list[tuple[str, int]]:
    """Return the type of device and the bytes of every allocation (+) and free (-), in order.

    `profile`: that has ended, made with ``profile_memory=True``.
    """
    found: list[tuple[int, str, int]] = []
    profiler: Any = profile.profiler
    pending = list(profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.device.type, fields.alloc_size))
    found.sort(key=lambda change: change[0])
    return [(device, size_bytes) for _, device, size_bytes in found]
