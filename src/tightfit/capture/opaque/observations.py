"""Observations of opaque modules in steps, used when they are measured again."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tightfit.errors import PlanMismatch

_MARGIN = 8
"""The share of room that is added where a module keeps more in one step than before."""


class ModuleObservations:
    """Observations of one module with operands of one geometry.

    `kept_bytes`: the most it kept for backward, with a margin. `new`: the outputs that were tensors
    of their own in some runs. Where they are an input in others, which cannot be predicted, the
    plan is given a copy of it. `overwritten`: the outputs that must not be a copy of an input, as
    one of both is changed in place later.
    """

    def __init__(self) -> None:
        self.kept_bytes = 0
        self.new: frozenset[int] = frozenset()
        self.overwritten: frozenset[int] = frozenset()
        self._handed_out: list[tuple[int, tuple[torch.Tensor, ...], list[int]]] = []
        self._given: tuple[torch.Tensor, ...] = ()

    def keeps(self, size_bytes: int) -> None:
        self.kept_bytes = size_bytes + size_bytes // _MARGIN

    def makes(self, outputs: frozenset[int]) -> None:
        """Note outputs that were tensors of their own."""
        self.new |= outputs

    def hands_out(self, output: int, *both: torch.Tensor) -> None:
        """Remember a traced output, with the input that it may be in another run."""
        self._handed_out.append((output, both, _versions(both)))

    def look_at_handed_out(self) -> None:
        """Note which of the outputs, or the inputs that they may be, were changed since."""
        changed = (k for k, both, before in self._handed_out if _versions(both) != before)
        self.overwritten |= frozenset(changed)

    def forget_handed_out(self) -> None:
        self._handed_out = []

    def refuse_copies(self, name: str, outputs: Sequence[int]) -> None:
        """Refuse to hand out a copy of an input where plain PyTorch would change both as one.

        Raises `PlanMismatch` if one of them or that input is changed in place later.
        """
        if self.overwritten.intersection(outputs):
            raise PlanMismatch(
                f"the opaque module {name!r} returned one of its inputs itself, which it does not "
                "always do. One of the two is changed in place afterwards, and that would change "
                "both here. Way out: let the module return x.clone()"
            )

    def is_given(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have it measured the next time with the inputs of this step."""
        self._given = tuple(t.detach() for t in tensors)

    def take_given(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors it is to be measured with, if that matters, and drop them."""
        given, self._given = self._given, ()
        return given


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


_OBSERVATIONS: weakref.WeakKeyDictionary[nn.Module, dict[Any, ModuleObservations]] = (
    weakref.WeakKeyDictionary()
)


def observations_of(module: nn.Module, operands: Any) -> ModuleObservations:
    return _OBSERVATIONS.setdefault(module, {}).setdefault(operands, ModuleObservations())
