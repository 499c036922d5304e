"""What is traced: a callable with its modules, its inputs, and what is known of it by now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tightfit.capture.decisions.answers import Answer
from tightfit.capture.side_effects.outside import PREFIX, OutsideTensors

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
    opaque : frozenset of str
        Names of modules to run as one op, besides those marked by `tightfit.opaque`.
    answers : tuple of Answer, optional
        What the forward was told about computed values when it really ran; see `probe`.
    answered : frozenset of str
        The inner modules for which these answers hold, besides the outermost.
    examples : mapping of str to sequence
        For opaque modules: the flattened arguments of each call when it really ran, as far as
        their values may decide something.
    outside : OutsideTensors, optional
        Tensors it uses that are neither parameter, buffer nor input.
    numbers : bool
        Whether numbers that it reads and only computes with become inputs of the step.
    """

    function: Callable[..., Any]
    modules: Mapping[str, nn.Module]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    detached_outputs: frozenset[int] = frozenset()
    loss_alone: bool = False
    opaque: frozenset[str] = frozenset()
    answers: tuple[Answer, ...] | None = None
    answered: frozenset[str] = frozenset()
    examples: Mapping[str, Sequence[Sequence[Any]]] = field(default_factory=dict)
    outside: OutsideTensors | None = None
    numbers: bool = False

    @property
    def owners(self) -> Mapping[str, nn.Module]:
        """The modules, and the one that holds outside tensors if there are any."""
        if self.outside is None:
            return self.modules
        return {**self.modules, PREFIX: self.outside.holder}
