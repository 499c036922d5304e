"""What the autograd graph of an eagerly run module keeps for its backward, as one value.

Inputs and outputs that backward needs are not kept here but read again from the plan's own values,
so that nothing is held twice or behind the plan's back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tightfit.torch_private import core as private

__all__ = ["Geometry", "Keeper", "Record", "Source"]


@dataclass(frozen=True)
class Geometry:
    """How a tensor lies in its storage."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage_bytes: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """Return the geometry of a tensor."""
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.untyped_storage().nbytes(),
            tensor.dtype,
            tensor.device,
        )

    def empty(self) -> torch.Tensor:
        """Return a new tensor of this geometry."""
        elements = -(-self.storage_bytes // self.dtype.itemsize)
        flat = torch.empty(elements, dtype=self.dtype, device=self.device)
        return flat.as_strided(self.shape, self.strides, self.offset)

    def over(self, base: torch.Tensor, moved_bytes: int) -> torch.Tensor:
        """Return the tensor of this geometry in the storage of another, moved by some bytes."""
        result = torch.empty(0, dtype=self.dtype, device=self.device)
        return result.set_(
            base.untyped_storage(),
            self.offset + moved_bytes // self.dtype.itemsize,
            self.shape,
            self.strides,
        )


class _Packed:
    """One tensor an autograd graph saved: held here, or found among the plan's values."""

    __slots__ = ("geometry", "index", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.geometry: Geometry | None = None
        self.index = 0


class Keeper:
    """Packs what an autograd graph saves, and unpacks it when backward asks.

    It knows nothing of the graph, which holds it: a cycle through the graph would never be freed.
    """

    def __init__(self) -> None:
        self.packed: list[_Packed] = []
        self.bound: list[tuple[torch.Tensor, int]] = []

    def pack(self, tensor: torch.Tensor) -> _Packed:
        packed = _Packed(tensor.detach())
        self.packed.append(packed)
        return packed

    def unpack(self, packed: _Packed) -> torch.Tensor:
        if packed.tensor is not None:
            return packed.tensor
        assert packed.geometry is not None
        base, offset_bytes = self.bound[packed.index]
        moved_bytes = base.storage_offset() * base.element_size() - offset_bytes
        return packed.geometry.over(base, moved_bytes)

    def refer(self, known: Sequence[torch.Tensor], allowed: Sequence[int] | None) -> list[int]:
        """Let go of saved tensors that lie in known ones; return those to bind for backward."""
        storages: dict[int, int] = {}
        for index, tensor in enumerate(known):
            if tensor.numel() and (allowed is None or index in allowed):
                storages.setdefault(private.storage_key(tensor), index)
        found = sorted(
            {storages[k] for p in self.packed if (k := _key(p)) is not None and k in storages}
        )
        place = {index: i for i, index in enumerate(allowed if allowed is not None else found)}
        for packed in self.packed:
            index = storages.get(_key(packed) or 0)
            if index is not None:
                assert packed.tensor is not None
                packed.geometry = Geometry.of(packed.tensor)
                packed.index = place[index]
                packed.tensor = None
        return list(allowed) if allowed is not None else found

    def held_bytes(self, resident: set[int]) -> int:
        """Return the bytes of the storages held here, those of the module itself left out."""
        held = {
            key: p.tensor.untyped_storage().nbytes()
            for p in self.packed
            if p.tensor is not None and (key := _key(p)) is not None
        }
        return sum(size for key, size in held.items() if key not in resident)


def _key(packed: _Packed) -> int | None:
    tensor = packed.tensor
    return private.storage_key(tensor) if tensor is not None and tensor.numel() else None


@dataclass
class Record:
    """An autograd graph that awaits its backward: the value that a plan keeps and frees.

    Parameters
    ----------
    keeper : Keeper
        Holds what the graph saved.
    sources, results : list of GradientEdge
        Where gradients leave the graph and where they enter; None: an output without gradient.
    saved : list of int
        Which operands, then outputs, are bound before backward.
    offsets_bytes : list of int
        Where each of them began in its storage.
    """

    keeper: Keeper
    sources: list[Any]
    results: list[Any]
    saved: list[int]
    offsets_bytes: list[int]


class Source(torch.autograd.Function):
    """Gives an existing tensor a place in an autograd graph that does not hold it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, None
