"""Every optimizer that a program makes, noticed as soon as it holds its parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch.optim import Optimizer


def each_new_optimizer(call: Callable[[Any], None]) -> AbstractContextManager[Any]:
    """Return a context in which a function is called with each optimizer that is made."""
    original = Optimizer.__init__

    @functools.wraps(original)
    def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        call(optimizer)

    return mock.patch.object(Optimizer, "__init__", init)
