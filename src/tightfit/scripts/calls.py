"""Every call of a module that no other module makes, seen before it begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_CALL = "__call__"


class OutermostCalls:
    """Says of every call of a module before it begins, unless it is within another.

    A hook of all modules would come too late: `nn.Module` looks up which forward to run before it
    calls hooks, and a module fitted there would run plainly once more. Within such a call
    `nn.Module` is unchanged for code that traces or compiles it.

    `before`: called with the module.
    """

    def __init__(self, before: Callable[[nn.Module], None]) -> None:
        self._before = before
        self._original: Callable[..., Any] = nn.Module.__call__

    def __enter__(self) -> None:
        original, before = self._original, self._before

        def seen(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            setattr(nn.Module, _CALL, original)
            try:
                before(module)
                return original(module, *args, **kwargs)
            finally:
                setattr(nn.Module, _CALL, seen)

        setattr(nn.Module, _CALL, seen)

    def __exit__(self, *error: Any) -> None:
        setattr(nn.Module, _CALL, self._original)
