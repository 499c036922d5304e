"""The state of autocast at an instant, to run code in that state later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tightfit.torch_private.core import autocast_dtypes, autocast_nesting


@dataclass(frozen=True)
class AutocastState:
    casts: tuple[tuple[str, torch.dtype], ...]  # device types with autocast, and to which type
    caches: bool  # whether casts of weights are cached
    is_nested: bool  # whether any context of autocast is open

    @classmethod
    def now(cls) -> AutocastState:
        """Return the state in the calling thread."""
        casts = autocast_dtypes()
        caches, is_nested = torch.is_autocast_cache_enabled(), autocast_nesting() > 0
        if caches and not (casts or is_nested):
            return _OFF  # the usual case, in every call
        return cls(casts, caches, is_nested)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Run code in this state."""
        now = AutocastState.now()
        if now == self:
            yield
            return
        with contextlib.ExitStack() as stack:
            for device, dtype in now.casts:
                stack.enter_context(torch.autocast(device, dtype, enabled=False))
            for device, dtype in self.casts:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=self.caches))
            yield


_OFF = AutocastState((), caches=True, is_nested=False)
