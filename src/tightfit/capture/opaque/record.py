"""Saved tensors of the autograd graph of an eagerly run module, as one value.

Inputs and outputs that backward needs are not kept here: they are read from the plan's own values.
So nothing is held twice, and nothing that the plan does not know of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tightfit.capture.calls.geometry import Geometry
from tightfit.capture.calls.structure import Structure
from tightfit.torch_private import core as private


class _Packed:
    """One tensor an autograd graph saved: held here, or found among the plan's values."""

    __slots__ = ("geometry", "index", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.geometry: Geometry | None = None
        self.index = 0

    def refer_to(self, index: int) -> None:
        """Drop the tensor: backward finds it in the value that is bound at a place."""
        assert self.tensor is not None
        self.geometry = Geometry.of(self.tensor)
        self.index = index
        self.tensor = None


class Keeper:
    """Packs tensors that an autograd graph saves, and unpacks them when backward asks.

    It knows nothing of the graph, which holds it: a cycle through the graph would never be freed.
    """

    def __init__(self) -> None:
        self._packed: list[_Packed] = []
        self._bound: list[tuple[torch.Tensor, int]] = []

    def pack(self, tensor: torch.Tensor) -> _Packed:
        packed = _Packed(tensor.detach())
        self._packed.append(packed)
        return packed

    def unpack(self, packed: _Packed) -> torch.Tensor:
        if packed.tensor is not None:
            return packed.tensor
        assert packed.geometry is not None
        base, offset_bytes = self._bound[packed.index]
        moved_bytes = base.storage_offset() * base.element_size() - offset_bytes
        return packed.geometry.over(base, moved_bytes)

    def refer(self, known: Sequence[torch.Tensor], allowed: Sequence[int] | None) -> list[int]:
        """Drop saved tensors that are views of known tensors; return those for backward."""
        storages: dict[int, int] = {}
        for index, tensor in enumerate(known):
            if tensor.numel() and (allowed is None or index in allowed):
                storages.setdefault(private.storage_key(tensor), index)
        found = sorted(
            {storages[k] for p in self._packed if (k := _key(p)) is not None and k in storages}
        )
        place = {index: i for i, index in enumerate(allowed if allowed is not None else found)}
        for packed in self._packed:
            index = storages.get(_key(packed) or 0)
            if index is not None:
                packed.refer_to(place[index])
        return list(allowed) if allowed is not None else found

    def held_bytes(self, resident: set[int]) -> int:
        """Return the bytes of the storages held here, without storages of the module itself."""
        held = {
            key: p.tensor.untyped_storage().nbytes()
            for p in self._packed
            if p.tensor is not None and (key := _key(p)) is not None
        }
        return sum(size for key, size in held.items() if key not in resident)

    def finish(self) -> None:
        """Leave packed tensors to the graph alone: it holds all of them by itself."""
        self._packed = []

    @contextlib.contextmanager
    def bound(
        self, tensors: Sequence[torch.Tensor], offsets_bytes: Sequence[int]
    ) -> Iterator[None]:
        """While backward runs, unpack references to given tensors.

        `offsets_bytes`: where each of them began in its storage when the graph was made.
        """
        self._bound = list(zip(tensors, offsets_bytes, strict=True))
        try:
            yield
        finally:
            self._bound = []


def _key(packed: _Packed) -> int | None:
    tensor = packed.tensor
    return private.storage_key(tensor) if tensor is not None and tensor.numel() else None


@dataclass(frozen=True)
class Record:
    """An autograd graph that awaits its backward: the value that a plan keeps and frees."""

    keeper: Keeper  # holds the graph's saved tensors
    # sources, results: where gradients leave the graph and where they enter; None: an output
    # without gradient
    sources: tuple[Any, ...]
    results: tuple[Any, ...]
    saved: tuple[int, ...]  # which operands, then outputs, are bound before backward
    offsets_bytes: tuple[int, ...]  # where each of them began in its storage


class Anchor(torch.autograd.Function):
    """Gives an existing tensor a place in an autograd graph that does not hold it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, None


TENSOR = object()
"""The placeholder of a tensor among the flattened arguments of a call."""


@dataclass(frozen=True)
class Operand:
    """One tensor that an opaque module reads."""

    geometry: Geometry  # its layout in memory
    requires_grad: bool  # whether a gradient is passed to it
    # The parameter's name inside the module; None: an argument of the call
    parameter: str | None = None
    example: torch.Tensor | None = None  # a real tensor to measure with, if there is any

    def real(self) -> torch.Tensor:
        if self.example is not None:
            return self.example.detach()
        return self.geometry.materialised()


@dataclass(frozen=True)
class Profile:
    """The measurements of one real run of an opaque module's forward."""

    outputs: tuple[Geometry, ...]  # of each tensor that it makes and returns
    differentiable: tuple[bool, ...]  # which of them require a gradient
    structure: Structure  # its output without the tensors
    # For each tensor it returns, the unchanged operand that it is, if any; such are no outputs
    passed: tuple[int | None, ...]
    saved: tuple[int, ...]  # tensors read by backward, counted over operands, then outputs
    record_bytes: int  # other bytes that the autograd graph keeps
    random: bool  # whether it may draw random numbers
    changed: tuple[str, ...]  # buffers and attributes of its module that it changes

    @property
    def pinned(self) -> str | None:
        """Why it may not run twice in a step."""
        return f"changes {self.changed[0]} of its module" if self.changed else None

    def filled(self, operands: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """Return the module's result, given its operands and outputs."""
        new = iter(outputs)
        return self.structure.filled([next(new) if i is None else operands[i] for i in self.passed])


@dataclass(frozen=True)
class Result:
    """The results of one run of an opaque module's forward."""

    outputs: tuple[torch.Tensor, ...]  # the tensors it returns, detached
    record: Record | None  # for its backward
    differentiable: tuple[bool, ...]  # which outputs require a gradient
    structure: Structure  # the output without the tensors
    passed: tuple[int | None, ...]  # as in `Profile`

    @property
    def new(self) -> frozenset[int]:
        """Which of the returned tensors are no operands."""
        return frozenset(i for i, place in enumerate(self.passed) if place is None)

    def is_like(self, other: Result) -> bool:
        """Whether another run returned as many tensors, in the same way."""
        return (self.passed, self.differentiable) == (other.passed, other.differentiable)


@dataclass(frozen=True)
class Backward:
    """The memory layout of an opaque call's backward."""

    tangents: tuple[Geometry, ...]  # the gradients it is given, of outputs
    gradients: tuple[Geometry | None, ...] = ()  # those it gives, of operands that require any
