"""Every optimizer that a program makes, seen as soon as it holds its parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch.optim import Optimizer


def new_optimizers(seen: Callable[[Any], None]) -> AbstractContextManager[Any]:
    """Call a function with each optimizer that is made meanwhile."""
    original = Optimizer.__init__

    @functools.wraps(original)
    def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        seen(optimizer)

    return mock.patch.object(Optimizer, "__init__", made)
