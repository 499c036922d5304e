"""Reentrant checkpoints (`torch.utils.checkpoint`) in a trace: what they run, and no more.

They run autograd inside of autograd, which no graph holds. Which results are kept and which are
computed again is the plan's to decide, and the results are the same either way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from tightfit.torch_private import core as private

__all__ = ["traced_checkpoints"]


@contextlib.contextmanager
def traced_checkpoints() -> Iterator[None]:
    """While tracing, let a reentrant checkpoint be the operators that it runs."""
    own = vars(CheckpointFunction).get("apply")
    original = CheckpointFunction.apply

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not private.is_tracing():
            return original(function, preserve, *args)
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
            return function(*args)
        with torch.no_grad():  # what it would compute again would not be asked for
            return function(*args)

    CheckpointFunction.apply = staticmethod(apply)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del CheckpointFunction.apply
        else:
            CheckpointFunction.apply = own  # type: ignore[method-assign]
