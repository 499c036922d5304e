"""``tightfit pack``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tightfit.cli import main
from tightfit.layout.blocks import Block
from tightfit.layout.io import load_layout, save_blocks
from tightfit.layout.validate import validate_layout

BLOCKS = (Block(7, 0, 4, 100), Block(8, 1, 2, 60), Block(9, 2, 6, 64))


@pytest.fixture
def trace(tmp_path: Path) -> str:
    save_blocks(BLOCKS, tmp_path / "trace.csv")
    return str(tmp_path / "trace.csv")


def test_a_trace_is_packed_written_and_drawn(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, picture = tmp_path / "layout.json.gz", tmp_path / "layout.svg"
    words = ["pack", trace, "-o", str(output), "--picture", str(picture)]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["height_bytes"] == found["lower_bound_bytes"] == 192
    assert (found["ratio"], found["proven_optimal"], found["status"]) == (1.0, True, "optimal")
    assert (found["blocks"], found["method"]) == (3, "auto") and found["seconds"] >= 0
    layout = load_layout(output)
    assert layout.blocks == BLOCKS and validate_layout(layout) == 192
    assert b"largest load 192 B" in picture.read_bytes()
    assert main(words) == 0
    assert "3 blocks in 192 B: 1.0000 times the largest load" in capsys.readouterr().out


def test_methods_and_alignments_are_chosen(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", trace, "--method", "first_fit", "--alignment", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["method"], found["lower_bound_bytes"]) == ("first_fit", 164)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "tetris"], "no packer is called 'tetris' (known: auto, paper"),
        (["--time-limit", "0"], "--time-limit must be a positive number"),
        (["--alignment", "0"], "at least 1 byte"),
        (["-o", "layout.txt"], "must end in .csv"),
        (["--picture", "layout.gif"], "must end in .svg"),
    ],
)
def test_impossible_options_of_pack_exit_2(
    words: list[str], message: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", trace, *words]) == 2
    assert message in capsys.readouterr().err
