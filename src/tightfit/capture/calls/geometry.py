"""Sizes, strides and offset of a tensor in its storage."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tightfit.costs.measured.call import materialise


@dataclass(frozen=True)
class Geometry:
    """Sizes, strides and offset of a tensor in its storage."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage_bytes: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.untyped_storage().nbytes(),
            tensor.dtype,
            tensor.device,
        )

    def empty(self) -> torch.Tensor:
        elements = -(-self.storage_bytes // self.dtype.itemsize)
        flat = torch.empty(elements, dtype=self.dtype, device=self.device)
        return flat.as_strided(self.shape, self.strides, self.offset)

    def materialised(self) -> torch.Tensor:
        """Return a new tensor, in memory of its own, with contents for any operator."""
        return materialise(self.shape, self.strides, self.dtype, self.device)

    def over(self, base: torch.Tensor, moved_bytes: int = 0) -> torch.Tensor:
        """Return the tensor of this geometry in the storage of another, moved by some bytes."""
        result = torch.empty(0, dtype=self.dtype, device=self.device)
        return result.set_(
            base.untyped_storage(),
            self.offset + moved_bytes // self.dtype.itemsize,
            self.shape,
            self.strides,
        )
