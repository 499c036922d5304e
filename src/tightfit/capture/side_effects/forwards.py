"""Forwards of modules, swapped for a while and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class SwappedForwards:
    """Remembers which forwards modules had before theirs were swapped.

    A module has a forward of its own, in place of its class's, if user code gave it one: it gets
    that back, or none.
    """

    def __init__(self) -> None:
        self._before: list[tuple[nn.Module, Any]] = []

    def swap(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._before.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward

    def put_back(self) -> None:
        """Give every module its own forward back, the last swapped first."""
        while self._before:
            module, own = self._before.pop()
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own
