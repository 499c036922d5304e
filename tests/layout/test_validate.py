"""The validator accepts exactly what a comparison of all pairs accepts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.blocks import some_blocks
from tightfit.errors import InvalidLayout
from tightfit.layout.blocks import Block, Layout, largest_load
from tightfit.layout.validate import validate_layout


@given(some_blocks(6), st.data())
def test_it_agrees_with_a_comparison_of_all_pairs(
    blocks: tuple[Block, ...], data: st.DataObject
) -> None:
    offsets = tuple(data.draw(st.integers(0, 12)) for _ in blocks)
    layout = Layout(blocks=blocks, offsets=offsets, alignment_bytes=1)
    places = list(zip(blocks, offsets, strict=True))
    clash = any(
        a.id < b.id
        and max(a.lower, b.lower) < min(a.upper, b.upper)
        and max(x, y) < min(x + a.size_bytes, y + b.size_bytes)
        for a, x in places
        for b, y in places
    )
    if clash:
        with pytest.raises(InvalidLayout, match="share bytes while both are alive"):
            validate_layout(layout)
    else:
        height = validate_layout(layout)
        assert height == max((x + b.size_bytes for b, x in places if b.size_bytes), default=0)
        assert height >= largest_load(blocks)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [((0,), "1 offsets for 2"), ((-64, 0), "is at -64"), ((0, 32), "is at 32")],
)
def test_wrong_numbers_are_refused(offsets: tuple[int, ...], message: str) -> None:
    blocks = (Block(0, 0, 1, 8), Block(1, 2, 3, 8))
    with pytest.raises(InvalidLayout, match=message):
        validate_layout(Layout(blocks=blocks, offsets=offsets))


def test_rounded_sizes_count() -> None:
    blocks = (Block(0, 0, 2, 65), Block(1, 1, 3, 1))
    with pytest.raises(InvalidLayout, match=r"bytes 0 to 128.*bytes 64 to 128"):
        validate_layout(Layout(blocks=blocks, offsets=(0, 64)))
    assert validate_layout(Layout(blocks=blocks, offsets=(0, 128))) == 192


def test_what_ends_frees_its_place_before_what_begins_takes_it() -> None:
    blocks = (Block(0, 0, 5, 8), Block(1, 5, 9, 8))
    assert validate_layout(Layout(blocks=blocks, offsets=(0, 0), alignment_bytes=1)) == 8
    assert largest_load(blocks) == 8
