"""Which places of far memory are taken in a step, and by what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from tightfit.capture.calls.geometry import Geometry
from tightfit.errors import OffloadFailed
from tightfit.units import format_bytes, rounded_up

Extent: TypeAlias = tuple[int, int]
"""A piece of far memory: where it begins, and its bytes."""


@dataclass(frozen=True)
class FarValue:
    """A value in far memory: its places there, and how to make a tensor of its bytes."""

    extents: tuple[Extent, ...]
    geometry: Geometry

    @property
    def nbytes(self) -> int:
        return self.geometry.storage_bytes

    def tensor(self, content: torch.Tensor) -> torch.Tensor:
        """Return the value as it was; `content`: the bytes of its storage."""
        return self.geometry.over(content)


class Space:
    """Which bytes of far memory are taken.

    `size_bytes`: how much may be. `unit_bytes`: sizes are rounded up to multiples of this.
    """

    def __init__(self, size_bytes: int, unit_bytes: int = 1) -> None:
        self._size_bytes = size_bytes
        self._unit_bytes = unit_bytes
        self._free: list[Extent] = []
        self.most_bytes = 0
        self._taken = 0

    def take(self, size: int) -> tuple[Extent, ...]:
        """Return places for so many bytes, in several pieces where need be.

        Raises `OffloadFailed` if the budget has no room for them.
        """
        size = rounded_up(size, self._unit_bytes)
        if self._taken + size > self._size_bytes:
            raise OffloadFailed(
                f"a step would hold {format_bytes(self._taken + size)} in far memory, more than "
                f"its plan said and than offload={format_bytes(self._size_bytes)} allows"
            )
        self._taken += size
        found: list[Extent] = []
        while size and self._free:
            begin, length = self._free.pop()
            found.append((begin, min(length, size)))
            if length > size:
                self._free.append((begin + size, length - size))
            size -= found[-1][1]
        if size:
            found.append((self.most_bytes, size))
            self.most_bytes += size
        return tuple(found)

    def give(self, extents: Sequence[Extent]) -> None:
        """Have bytes taken no longer; neighbours become one piece."""
        self._taken -= sum(size for _, size in extents)
        pieces = sorted([*self._free, *extents])
        self._free = pieces[:1]
        for begin, size in pieces[1:]:
            last, length = self._free[-1]
            if last + length == begin:
                self._free[-1] = (last, length + size)
            else:
                self._free.append((begin, size))
