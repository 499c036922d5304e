"""Files of blocks and layouts: what is written is read again, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.blocks import some_blocks
from support.documents import DOCS, example_of
from tightfit.errors import BadInput
from tightfit.layout.blocks import Block, Layout
from tightfit.layout.io import (
    LAYOUT_SUFFIXES,
    load_blocks,
    load_layout,
    save_blocks,
    save_layout,
)
from tightfit.layout.validate import validate_layout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@given(blocks=some_blocks(5), data=st.data(), suffix=st.sampled_from(LAYOUT_SUFFIXES))
def test_round_trip(
    blocks: tuple[Block, ...], data: st.DataObject, suffix: str, folder: Path
) -> None:
    path = folder / f"file{suffix}"
    save_blocks(blocks, path)
    assert load_blocks(path) == blocks
    layout = Layout(blocks=blocks, offsets=tuple(data.draw(st.integers(0, 9)) for _ in blocks))
    save_layout(layout, path)
    assert load_layout(path) == layout


def test_the_examples_of_the_document(tmp_path: Path) -> None:
    (tmp_path / "layout.json").write_bytes(example_of("layout-format.md"))
    layout = load_layout(tmp_path / "layout.json")
    assert validate_layout(layout) == 192
    table = (DOCS / "layout-format.md").read_text("utf-8").split("```csv\n")[1].split("```")[0]
    (tmp_path / "layout.csv").write_text(table)
    assert load_layout(tmp_path / "layout.csv") == layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,lower,upper\n", "no column 'size'"),
        ("", "no column 'id'"),
        ("id,lower,upper,size\n0,1,2\n", "line 2"),
        ("id,lower,upper,size\n0,1,2,4\n1,1,x,4\n", "line 3"),
        ("id,lower,upper,size\n0,2,2,4\n", "lives from 2 to 2"),
        ("id,lower,upper,size\n0,1,2,-4\n", "-4 bytes"),
        ("id,lower,upper,size\n0,1,2,4\n0,1,2,4\n", "two blocks have the id 0"),
        ("\0\xff", "no column"),
    ],
)
def test_what_is_wrong_in_csv_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "blocks.csv"
    path.write_bytes(text.encode())
    with pytest.raises(BadInput, match=message):
        load_blocks(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"must end in \.csv"):
        load_blocks(tmp_path / "blocks.txt")
    path = tmp_path / "blocks.json"
    path.write_text('{"format": 1, "blocks": [{"id": 0, "lower": 1, "upper": 2}]}')
    with pytest.raises(BadInput, match="size_bytes"):
        load_blocks(path)
    save_blocks([Block(0, 1, 2, 3)], path)
    with pytest.raises(BadInput, match="pack it first"):
        load_layout(path)
