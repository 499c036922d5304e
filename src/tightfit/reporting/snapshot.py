"""Memory snapshots of PyTorch: a planned step opens in PyTorch's own viewer.

The file has the format of ``torch.cuda.memory._dump_snapshot``: a pickled dict of segments and of
the events on each device (https://docs.pytorch.org/memory_viz, ``torch/cuda/_memory_viz.py``).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_PROTOCOL = 4  # the newest that the viewer in the browser reads
_BASE = 1 << 40  # the address of the first byte
_GAP = 1 << 30  # between two segments


@dataclass(frozen=True)
class PlacedBlock:
    # lower, upper: alive at the ticks [lower, upper); blocks alive at the last tick of all stay
    lower: int
    upper: int
    # offset, size_bytes: in the arena
    offset: int
    size_bytes: int
    category: str  # as PyTorch's memory profiler names them: ``"activation"``, ``"gradient"``, ..
    # Who allocates it, the innermost first: name, file or module, line or number
    names: tuple[tuple[str, str, int], ...]

    @property
    def frames(self) -> list[dict[str, Any]]:
        """Return its names as the frames of a call stack."""
        return [{"name": n, "filename": file, "line": line} for n, file, line in self.names]


def snapshot(
    blocks: Sequence[PlacedBlock],
    constants: Sequence[PlacedBlock],
    *,
    height_bytes: int,
    seconds_at: Sequence[float],
) -> bytes:
    """Return the content of a snapshot file.

    `blocks`: of the step; they are in one segment as high as the layout. `constants`: resident the
    whole step, in a segment below it. `height_bytes`: of the layout of `blocks`. `seconds_at`: when
    each tick happens, from the start of the step.
    """
    constant_bytes = sum(block.size_bytes for block in constants)
    arena = _BASE + constant_bytes + _GAP
    last = max((block.upper for block in blocks), default=0)
    kept = [block for block in blocks if block.upper == last]
    segments = [_segment(_BASE, constant_bytes, constants), _segment(arena, height_bytes, kept)]
    segments = [segment for segment in segments if segment["total_size"]]
    events = [_reserved(segment) for segment in segments]
    events += [_event("alloc", block, _BASE, 0.0) for block in constants]
    for tick, ends, block in sorted(_changes(blocks, last), key=lambda change: change[:2]):
        seconds = seconds_at[min(tick, len(seconds_at) - 1)]
        for action in ("alloc",) if ends else ("free_requested", "free_completed"):
            events.append(_event(action, block, arena, seconds))
    content = {"segments": segments, "device_traces": [events]}
    return pickle.dumps(content, protocol=_PROTOCOL)


def _changes(blocks: Sequence[PlacedBlock], last: int) -> Iterator[tuple[int, bool, PlacedBlock]]:
    """When blocks end (False) and begin (True); at equal ticks ends come first."""
    for block in blocks:
        yield block.lower, True, block
        if block.upper < last:
            yield block.upper, False, block


def _reserved(segment: dict[str, Any]) -> dict[str, Any]:
    return {
        "action": "segment_alloc",
        "addr": segment["address"],
        "size": segment["total_size"],
        "stream": 0,
        "time_us": 0,
        "frames": [],
    }


def _event(action: str, block: PlacedBlock, base: int, seconds: float) -> dict[str, Any]:
    return {
        "action": action,
        "addr": base + block.offset,
        "size": block.size_bytes,
        "stream": 0,
        "time_us": round(1e6 * seconds),
        "category": block.category,
        "frames": block.frames,
    }


def _segment(address: int, total_bytes: int, alive: Sequence[PlacedBlock]) -> dict[str, Any]:
    """Return a segment in which some blocks are alive and the rest is free."""
    blocks: list[dict[str, Any]] = []
    end = 0
    for block in sorted(alive, key=lambda placed: placed.offset):
        if block.offset > end:
            blocks.append(_block(address + end, block.offset - end, "inactive", []))
        blocks.append(
            _block(address + block.offset, block.size_bytes, "active_allocated", block.frames)
        )
        end = block.offset + block.size_bytes
    if end < total_bytes:
        blocks.append(_block(address + end, total_bytes - end, "inactive", []))
    active = sum(block.size_bytes for block in alive)
    return {
        "device": 0,
        "address": address,
        "total_size": total_bytes,
        "allocated_size": active,
        "active_size": active,
        "requested_size": active,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _block(
    address: int, size_bytes: int, state: str, frames: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "address": address,
        "size": size_bytes,
        "requested_size": size_bytes,
        "state": state,
        "frames": frames,
    }
