"""No two living blocks share a byte, whatever is requested and freed, when and by whom."""

from __future__ import annotations

import os
import threading
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.blocks import some_blocks
from tightfit.allocator import CpuMeter
from tightfit.allocator.replay import Replay
from tightfit.errors import BadInput
from tightfit.layout.blocks import Block
from tightfit.layout.pack import pack
from tightfit.layout.predecessors import predecessors


def planned(blocks: tuple[Block, ...]) -> tuple[list[Block], list[int], int]:
    """Lay blocks out; the requests of a step in order, their places, and the height."""
    requests = sorted(blocks, key=lambda block: block.lower)
    packed = pack(requests, "portfolio")
    return requests, list(packed.layout.offsets), packed.height_bytes


def installed(replay: Replay, requests: list[Block], offsets: list[int]) -> int:
    sizes = [block.rounded_bytes(64) for block in requests]
    number = replay.add(sizes, offsets, predecessors(sizes, offsets))
    assert number is not None
    return number


class Living:
    """Tensors that are alive, by name; checks that they are apart and keep what was written."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}

    def add(self, name: int, size: int) -> torch.Tensor:
        tensor = torch.empty(size, dtype=torch.uint8)
        begin, end = tensor.data_ptr(), tensor.data_ptr() + size
        for other in self.tensors.values():
            assert end <= other.data_ptr() or other.data_ptr() + other.numel() <= begin
        self.tensors[name] = tensor
        return tensor

    def drop(self, name: int, *, elsewhere: bool) -> None:
        if elsewhere:
            thread = threading.Thread(target=self.tensors.pop, args=(name,))
            thread.start()
            thread.join()
        else:
            del self.tensors[name]


BLOCKS = some_blocks(12, sizes=[1, 64, 100, 1000, 4096])


@given(BLOCKS)
@settings(max_examples=60)
def test_a_step_that_goes_as_planned_lies_as_planned(blocks: tuple[Block, ...]) -> None:
    requests, offsets, height = planned(blocks)
    replay = Replay(height)
    number = installed(replay, requests, offsets)
    events = [(b.lower, True, i) for i, b in enumerate(requests)]
    events += [(b.upper, False, i) for i, b in enumerate(requests)]
    for _ in range(2):
        living, bases = Living(), set[int]()
        replay.begin(number)
        for _, is_birth, i in sorted(events):
            if is_birth:
                bases.add(living.add(i, requests[i].size_bytes).data_ptr() - offsets[i])
            else:
                living.drop(i, elsewhere=False)
        done = replay.end()
        assert done.hits == done.requests == len(requests) and done.fallbacks == 0
        assert len(bases) <= 1 and replay.alive == 0


@given(BLOCKS, st.data())
@settings(max_examples=150)
def test_no_deviation_makes_two_living_blocks_share_a_byte(
    blocks: tuple[Block, ...], data: st.DataObject
) -> None:
    """Other sizes, frees that come late or never, by other threads, blocks from earlier steps."""
    meter = CpuMeter()
    before = meter.live_bytes()
    requests, offsets, height = planned(blocks)
    for number in data.draw(st.sets(st.integers(0, 11))):
        if number < len(offsets):
            offsets[number] = -1
    replay = Replay(height)
    numbers = [installed(replay, requests, offsets), installed(replay, requests[1:], offsets[1:])]
    living, name = Living(), 0
    for _ in range(3):
        replay.begin(data.draw(st.sampled_from(numbers)))
        for _ in range(data.draw(st.integers(0, 15))):
            if living.tensors and data.draw(st.booleans()):
                gone = data.draw(st.sampled_from(sorted(living.tensors)))
                living.drop(gone, elsewhere=data.draw(st.integers(0, 9)) == 0)
            else:
                living.add(name, data.draw(st.sampled_from([1, 64, 100, 1000, 4096, 9000])))
                name += 1
        done = replay.end()
        assert done.requests == done.hits + done.outside + done.fallbacks
    if data.draw(st.booleans()):
        replay.close()
    for gone in sorted(living.tensors):
        living.drop(gone, elsewhere=False)
    assert meter.live_bytes() == before


def test_an_arena_that_is_gone_while_a_thread_is_inside() -> None:
    replay = Replay(1 << 20)
    replay.begin(installed(replay, [Block(0, 0, 1, 64)] * 3, [0, 64, 128]))
    kept = torch.full((64,), 7, dtype=torch.uint8)
    del replay
    after = torch.full((64,), 8, dtype=torch.uint8)
    assert bool((kept == 7).all()) and bool((after == 8).all())
    other = Replay(64)
    other.begin(installed(other, [Block(0, 0, 1, 64)], [0]))
    with pytest.raises(BadInput, match="nested"):
        other.begin(0)
    other.end()


def test_a_forked_child_takes_nothing_from_the_arena_of_its_parent() -> None:
    replay = Replay(1 << 20)
    replay.begin(installed(replay, [Block(0, 0, 1, 64)] * 3, [0, 64, 128]))
    first = torch.empty(64, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of other threads in the process
        child = os.fork()
    if child == 0:
        second = torch.empty(64, dtype=torch.uint8)
        os._exit(0 if abs(second.data_ptr() - first.data_ptr()) > 1 << 20 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.empty(64, dtype=torch.uint8).data_ptr() == first.data_ptr() + 64
    replay.end()
