"""The call to trace: a callable with its modules, its inputs, and earlier findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from tightfit.capture.calls.structure import flatten


@dataclass(frozen=True)
class TracedCall:
    """The call to trace: a callable, the modules whose parameters it uses, example inputs."""

    function: Callable[..., Any]  # the model's own forward, or a function of the inputs
    modules: Mapping[str, nn.Module]  # the modules whose parameters it uses
    # args, kwargs: real or fake
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    detached_outputs: frozenset[int] = frozenset()  # flattened outputs known to receive no gradient
    # Whether outputs returned along with a loss receive none either
    loss_alone: bool = False
    # Whether numbers that it reads and only computes with become inputs of the step
    numbers: bool = False
    # Whether gradients of its outputs come with other strides than the outputs have
    other_strides: bool = False

    @property
    def leaves(self) -> list[Any]:
        """Its flattened inputs."""
        return flatten((self.args, self.kwargs))[0]
