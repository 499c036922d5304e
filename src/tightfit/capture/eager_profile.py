"""What is known of an eagerly run module: what goes in, what one real run of it showed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tightfit.capture.calls.structure import Structure
from tightfit.capture.opaque.record import Geometry, Record
from tightfit.costs.measured.call import materialise

__all__ = ["TENSOR", "Operand", "Profile", "Result"]

TENSOR = object()
"""Stands for a tensor among the flattened arguments of a block."""


@dataclass(frozen=True)
class Operand:
    """One tensor a block reads.

    Parameters
    ----------
    geometry : Geometry
        Its layout.
    requires_grad : bool
        Whether the block passes a gradient to it.
    parameter : str or None
        The parameter's name inside the block; None: an argument of the call.
    example : tensor or None
        A real tensor to measure with, where one is at hand.
    """

    geometry: Geometry
    requires_grad: bool
    parameter: str | None = None
    example: torch.Tensor | None = None

    def real(self) -> torch.Tensor:
        """Return a real tensor to measure with."""
        if self.example is not None:
            return self.example.detach()
        g = self.geometry
        return materialise(g.shape, g.strides, g.dtype, g.device)


@dataclass(frozen=True)
class Profile:
    """What one real run of a block's forward showed.

    Parameters
    ----------
    outputs : tuple of Geometry
        Of each tensor it returns, those that it was given left out.
    differentiable : tuple of bool
        Which of them require a gradient.
    structure : Structure
        Its output without the tensors.
    passed : tuple of (int or None)
        For each tensor it returns the operand it is, if it is one unchanged; these are no outputs.
    saved : tuple of int
        What backward reads, counted over the operands and then the outputs.
    record_bytes : int
        What the autograd graph keeps besides.
    random : bool
        Whether it may draw random numbers.
    changed : tuple of str
        Buffers and attributes of its module that it changes.
    """

    outputs: tuple[Geometry, ...]
    differentiable: tuple[bool, ...]
    structure: Structure
    passed: tuple[int | None, ...]
    saved: tuple[int, ...]
    record_bytes: int
    random: bool
    changed: tuple[str, ...]

    @property
    def pinned(self) -> str | None:
        """Why it may not run twice in a step."""
        return f"changes {self.changed[0]} of its module" if self.changed else None

    def filled(self, operands: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """Return what the module returns, given its operands and outputs."""
        new = iter(outputs)
        return self.structure.filled([next(new) if i is None else operands[i] for i in self.passed])


@dataclass
class Result:
    """What one run of a block gave.

    Parameters
    ----------
    outputs : list of tensor
        The tensors it returns, detached.
    record : Record or None
        What its backward needs.
    differentiable : tuple of bool
        Which outputs require a gradient.
    structure : Structure
        The output without the tensors.
    passed : tuple of (int or None)
        As in `Profile`.
    """

    outputs: list[torch.Tensor]
    record: Record | None
    differentiable: tuple[bool, ...]
    structure: Structure
    passed: tuple[int | None, ...]

    def is_like(self, other: Result) -> bool:
        """Whether another run returned as many tensors, in the same way."""
        return (self.passed, self.differentiable) == (other.passed, other.differentiable)
