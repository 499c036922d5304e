"""What every registered packer must do; a new packer is tested by being registered."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.blocks import crowded_blocks, lowest_height, perfect_packings, some_blocks
from tightfit.errors import BadInput
from tightfit.layout.blocks import Block, largest_load
from tightfit.layout.pack import pack
from tightfit.layout.packers.base import PackingLimits
from tightfit.layout.packers.registry import DEFAULT_PACKER, PACKERS

AMPLE = PackingLimits(seconds=60.0)
EXAMPLES = {"mip": 20, "cpsat": 1}
"""How many where each takes long: CP-SAT starts a process."""


@pytest.fixture(params=sorted(PACKERS))
def packer(request: pytest.FixtureRequest) -> str:
    if PACKERS[request.param].extra == "cpsat" and importlib.util.find_spec("ortools") is None:
        pytest.skip("needs tightfit[cpsat]")
    return request.param


def test_layouts_are_valid_and_no_lower_than_the_least_height(packer: str) -> None:
    exact = PACKERS[packer].is_exact
    small = st.one_of(some_blocks(6), crowded_blocks(6))

    @settings(max_examples=EXAMPLES.get(packer, 60))
    @given(small, st.sampled_from([1, 4, 64]))
    def check(blocks: tuple[Block, ...], alignment: int) -> None:
        packed = pack(blocks, packer, AMPLE, alignment_bytes=alignment)  # validates
        rounded = [Block(b.id, b.lower, b.upper, b.rounded_bytes(alignment)) for b in blocks]
        least = lowest_height([b for b in rounded if b.size_bytes])
        assert packed.height_bytes >= least >= packed.proven_bytes
        assert packed.lower_bound_bytes == largest_load(blocks, alignment)
        if exact:
            assert packed.height_bytes == least and packed.is_proven_optimal

    check()


def test_the_same_blocks_get_the_same_layout(packer: str) -> None:
    @settings(max_examples=EXAMPLES.get(packer, 10) // 5 + 1)
    @given(crowded_blocks(30))
    def check(blocks: tuple[Block, ...]) -> None:
        layouts = {pack(blocks, packer, AMPLE, alignment_bytes=1).layout for _ in range(2)}
        assert len(layouts) == 1

    check()


@settings(max_examples=100)
@given(perfect_packings(100))
def test_perfect_packings_are_found(blocks: tuple[Block, ...]) -> None:
    packed = pack(blocks, DEFAULT_PACKER, AMPLE, alignment_bytes=1)
    assert packed.height_bytes == packed.lower_bound_bytes == 60


def test_no_blocks_take_no_memory(packer: str) -> None:
    empty = pack([Block(3, 0, 5, 0)], packer)
    assert (empty.height_bytes, empty.layout.offsets, empty.is_proven_optimal) == (0, (0,), True)


def test_what_cannot_be_packed_is_said() -> None:
    with pytest.raises(BadInput, match="no packer is called 'tetris'"):
        pack([], "tetris")
    with pytest.raises(BadInput, match="alignment"):
        pack([], alignment_bytes=0)
    many = [Block(number, 0, 1, 64) for number in range(300)]
    with pytest.raises(BadInput, match="use packer 'auto'"):
        pack(many, "mip")
