"""What is traced: a callable with its modules, its inputs, and what is known of it by now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["TracedCall"]


@dataclass(frozen=True)
class TracedCall:
    """What is traced: a callable, the modules whose parameters it uses, example inputs.

    Parameters
    ----------
    function : callable
        The model's own forward, or a function of the inputs.
    modules : mapping of str to nn.Module
        The modules whose parameters it uses.
    args, kwargs
        Real or fake.
    detached_outputs : frozenset of int
        Flattened outputs known to receive no gradient.
    loss_alone : bool
        Whether outputs beside a loss that the output carries receive none either.
    numbers : bool
        Whether numbers that it reads and only computes with become inputs of the step.
    """

    function: Callable[..., Any]
    modules: Mapping[str, nn.Module]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    detached_outputs: frozenset[int] = frozenset()
    loss_alone: bool = False
    numbers: bool = False
