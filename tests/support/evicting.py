"""Eviction at its worst: before every operator, all that can be."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

import tightfit


class EvictEverything(TorchDispatchMode):
    """Takes the memory of everything that can be computed again, before every operator."""

    def __init__(self, region: tightfit.Online) -> None:
        super().__init__()
        self.region = region

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.region.evict("1TiB")
        return func(*args, **(kwargs or {}))
