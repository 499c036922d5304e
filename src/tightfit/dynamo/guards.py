"""What Dynamo does not guard and a graph depends on: the hooks of all modules."""

from __future__ import annotations

from typing import Any

from tightfit.torch_private.settings import global_settings

__all__ = ["RunningHooks"]


class RunningHooks:
    """Hooks that run around every module, by what Dynamo has made graphs for."""

    def now(self) -> Any:
        """Return what graphs depend on, as it is now: another one asks for graphs of its own."""
        return global_settings()
