"""Blocks from the events an allocator recorded, such as PyTorch's memory history on CUDA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tightfit.errors import BadInput
from tightfit.layout.blocks import Block

__all__ = ["blocks_of_history"]


def blocks_of_history(events: Iterable[Mapping[str, Any]]) -> tuple[Block, ...]:
    """Return the blocks that a history of one device allocates, in the order of allocation.

    `events`: a list of ``device_traces`` in a memory snapshot of PyTorch: ``alloc`` begins a block
    of `size` bytes at `addr`; ``free_completed`` ends it, when no stream needs it any more. The
    other actions concern segments, and frees that are only requested. Ticks count allocations and
    completed frees from 1 on; frees of older blocks are passed over, and blocks that are not freed
    end with the history. Raises `BadInput` if a block is allocated where another is alive: events
    are missing.
    """
    tick = 0
    begun: dict[int, tuple[int, int, int]] = {}  # address: id, lower, size
    blocks: list[Block] = []
    for event in events:
        address = event.get("addr", 0)
        if event["action"] == "alloc":
            tick += 1
            if address in begun:
                raise BadInput(
                    f"the history allocates address {address:#x} twice and frees it never; record "
                    "with max_entries larger than the events of a step"
                )
            begun[address] = (len(blocks) + len(begun), tick, event["size"])
        elif event["action"] == "free_completed" and address in begun:
            tick += 1
            number, lower, size = begun.pop(address)
            blocks.append(Block(number, lower, tick, size))
    for number, lower, size in begun.values():
        blocks.append(Block(number, lower, tick + 1, size))
    return tuple(sorted(blocks, key=lambda block: block.id))
