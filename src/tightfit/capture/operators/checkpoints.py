"""Checkpoints (`torch.utils.checkpoint`) in a trace: their operators, without recomputation.

Reentrant checkpoints run autograd inside of autograd, which no graph can represent. Which results
are kept and which are computed again is the plan's to decide. The results are the same either way,
but for state that a region changes when it runs again.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from tightfit.torch_private import core as private
from tightfit.torch_private.saving import watched_checkpoints

__all__ = ["Checkpoints", "SeenCheckpoints", "traced_checkpoints"]


class Checkpoints(enum.Enum):
    """The checkpoints of a forward, whose regions plain PyTorch runs again in backward."""

    NONE = "none"
    SAME_DRAWS = "each draws the random numbers that it drew at first"
    OTHER_DRAWS = "one draws other random numbers"


class SeenCheckpoints:
    """The checkpoints that a traced forward goes through."""

    def __init__(self) -> None:
        self.found = Checkpoints.NONE

    def note(self, preserve: bool) -> None:
        """Note a checkpoint, and whether it keeps the state of random generators."""
        if not preserve:
            self.found = Checkpoints.OTHER_DRAWS
        elif self.found is Checkpoints.NONE:
            self.found = Checkpoints.SAME_DRAWS


@contextlib.contextmanager
def traced_checkpoints(seen: SeenCheckpoints) -> Iterator[None]:
    """While tracing, let a reentrant checkpoint be the operators that it runs.

    `seen`: called with every checkpoint.
    """
    own = vars(CheckpointFunction).get("apply")
    original = CheckpointFunction.apply

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not private.is_tracing():
            return original(function, preserve, *args)
        seen.note(preserve)
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
            return function(*args)
        with torch.no_grad():  # recomputed values would not be asked for
            return function(*args)

    CheckpointFunction.apply = staticmethod(apply)  # type: ignore[method-assign]
    try:
        with watched_checkpoints(seen.note):
            yield
    finally:
        if own is None:
            del CheckpointFunction.apply
        else:
            CheckpointFunction.apply = own  # type: ignore[method-assign]
