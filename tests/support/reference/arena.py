"""One contiguous range of addresses: free bytes do not help where they are not adjacent.

Every storage has a range of its own; an allocation takes the smallest hole that fits, of several
the first; holes that touch become one. The Coop window is of Zhang et al., Coop (NeurIPS 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tightfit.units import rounded_up

_GRANULARITY_BYTES = 512
"""Sizes are rounded up to this, as GPU allocators round."""


class _Piece(NamedTuple):
    """A stretch of addresses; a hole has no owner."""

    offset: int
    size_bytes: int
    owner: int | None

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


class Arena:
    """Which addresses belong to whom."""

    def __init__(self, size_bytes: int) -> None:
        self._pieces = [_Piece(0, size_bytes, None)] if size_bytes > 0 else []

    @property
    def free_bytes(self) -> int:
        """Bytes of all holes."""
        return sum(piece.size_bytes for piece in self._pieces if piece.owner is None)

    def take(self, size_bytes: int, owner: int) -> bool:
        """Give an owner the smallest hole that fits; False if there is none."""
        needed = rounded_up(size_bytes, _GRANULARITY_BYTES)
        holes = [p for p in self._pieces if p.owner is None and p.size_bytes >= needed]
        if not holes:
            return False
        hole = min(holes, key=lambda piece: piece.size_bytes)
        rest = _Piece(hole.offset + needed, hole.size_bytes - needed, None)
        at = self._pieces.index(hole)
        taken = _Piece(hole.offset, needed, owner)
        self._pieces[at : at + 1] = [taken, rest] if rest.size_bytes else [taken]
        return True

    def give_back(self, owner: int) -> None:
        """Make a hole of an owner's place."""
        pieces: list[_Piece] = []
        for piece in self._pieces:
            freed = piece._replace(owner=None) if piece.owner == owner else piece
            if pieces and pieces[-1].owner is None and freed.owner is None:
                last = pieces.pop()
                freed = _Piece(last.offset, last.size_bytes + freed.size_bytes, None)
            pieces.append(freed)
        self._pieces = pieces

    def hand_over(self, owner: int, heir: int) -> None:
        """Give an owner's place to another."""
        self._pieces = [p._replace(owner=heir) if p.owner == owner else p for p in self._pieces]

    def free_next_to(self, owner: int) -> int:
        """Return the bytes of the holes directly before and after an owner's range."""
        own = next((piece for piece in self._pieces if piece.owner == owner), None)
        if own is None:
            return 0
        return sum(
            piece.size_bytes
            for piece in self._pieces
            if piece.owner is None and own.offset in (piece.end, piece.offset - own.size_bytes)
        )

    def cheapest_window(
        self, size_bytes: int, cost: Callable[[int], float | None]
    ) -> list[int] | None:
        """Return whose ranges, with the holes between them, make room at the least sum of costs.

        `cost`: of an owner; None if it may not go. Returns owners by address, of equal sums the
        first; None if no window is large enough.
        """
        needed = rounded_up(size_bytes, _GRANULARITY_BYTES)
        best: list[int] | None = None
        least = math.inf
        for window in self._windows(needed, cost):
            total = sum(price for _, price in window)
            if best is None or total < least:
                best, least = [owner for owner, _ in window], total
        return best

    def _windows(
        self, needed: int, cost: Callable[[int], float | None]
    ) -> Iterator[list[tuple[int, float]]]:
        """Yield for each piece that may end a window the shortest one: owners and their costs."""
        costs = [0.0 if p.owner is None else cost(p.owner) for p in self._pieces]
        for end in range(len(self._pieces)):
            found: list[tuple[int, float]] = []
            total = 0
            for piece, price in zip(self._pieces[end::-1], costs[end::-1], strict=True):
                if price is None:
                    break
                total += piece.size_bytes
                if piece.owner is not None:
                    found.append((piece.owner, price))
                if total >= needed:
                    yield found[::-1]
                    break
