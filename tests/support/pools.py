"""A pool of PyTorch's CUDA allocator, as far as its rules are known: for tests without a GPU."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from tightfit.allocator.cuda_arena_memory import ArenaMemoryState

SMALL, GRANULARITY = 1 << 20, 512


@dataclass
class _Stretch:
    address: int
    size: int
    held: bool = False
    asked: int = 0


class Block:
    """What holds a stretch as long as it lives."""

    def __init__(self, pool: FakePool, address: int) -> None:
        self.pool, self.address = pool, address

    def __del__(self) -> None:
        self.pool.free(self.address)


class FakePool:
    """Large requests: the smallest free stretch that is large enough, the lowest of several.

    What is left of it stays free where that is more than small; otherwise it goes along.
    Neighbours that are free become one. Where nothing fits, a new segment is taken.
    """

    def __init__(self, least_left: int = SMALL + 1) -> None:
        self.segments: list[list[_Stretch]] = []
        self.least_left = least_left  # 512 where segments may grow

    @property
    def reserved(self) -> int:
        return sum(stretch.size for segment in self.segments for stretch in segment)

    def request(self, size: int) -> Block:
        assert size > SMALL
        size = -(-size // GRANULARITY) * GRANULARITY
        free = [
            (s.size, s.address, segment)
            for segment in self.segments
            for s in segment
            if not s.held and s.size >= size
        ]
        if not free:
            top = max((s[-1].address + s[-1].size for s in self.segments), default=1 << 30)
            taken = 20 << 20 if size < 10 << 20 else -(-size // (2 << 20)) * (2 << 20)
            self.segments.append([_Stretch(top + (1 << 30), taken)])
            free = [(taken, top + (1 << 30), self.segments[-1])]
        _, address, segment = min(free, key=lambda row: row[:2])
        self._take(segment, address, size)
        return Block(self, address)

    def free(self, address: int) -> None:
        for segment in self.segments:
            for n, s in enumerate(segment):
                if s.address == address:
                    assert s.held
                    s.held = False
                    neighbours = [m for m in (n - 1, n, n + 1) if 0 <= m < len(segment)]
                    merged = [segment[m] for m in neighbours if not segment[m].held]
                    for each in merged:
                        segment.remove(each)
                    size = sum(each.size for each in merged)
                    insort(segment, _Stretch(merged[0].address, size), key=lambda s: s.address)
                    return
        raise AssertionError(f"no block at {address:#x}")

    def _take(self, segment: list[_Stretch], address: int, size: int) -> None:
        stretch = next(s for s in segment if s.address == address)
        assert not stretch.held and stretch.size >= size
        if stretch.size - size >= self.least_left:
            self._split(segment, stretch, size)
        stretch.held, stretch.asked = True, size

    def _split(self, segment: list[_Stretch], stretch: _Stretch, size: int) -> None:
        rest = _Stretch(stretch.address + size, stretch.size - size)
        stretch.size = size
        insort(segment, rest, key=lambda s: s.address)


class FakeArenaMemory:
    """A memory in such a pool; counts who is inside."""

    def __init__(self, height_bytes: int, least_left: int = SMALL + 1) -> None:
        self.height_bytes = height_bytes
        self.pool = FakePool(least_left)
        block = self.pool.request(height_bytes)
        self.base = block.address
        self.is_inside = False
        self.placed = 0

    @property
    def reserved_bytes(self) -> int:
        return self.pool.reserved

    def state(self) -> ArenaMemoryState:
        if len(self.pool.segments) > 1:
            return "grown"
        return "held" if any(s.held for s in self.pool.segments[0]) else "free"

    def take(self, size_bytes: int) -> tuple[int, Block]:
        self.placed += 1
        block = self.pool.request(size_bytes)
        return block.address - self.base, block

    def enter(self) -> None:
        self.is_inside = True

    def leave(self) -> None:
        self.is_inside = False
