"""Which batches of a data set fit is found with few plans, and reported before training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.graphs import two_layers
from tightfit.cli import main
from tightfit.cli.checks import lengths
from tightfit.graph import Graph
from tightfit.planners.base import Limits
from tightfit.planners.questions.lengths import longest_fit
from tightfit.planners.questions.request import PlanRequest
from tightfit.progress import SILENT

LEAST = 4600
"""What a step of two layers needs at least; each unit of length adds a byte of inputs to it."""


def step_of(length: int) -> Graph:
    return two_layers().with_constants(inputs=two_layers().constants_bytes["inputs"] + length)


@pytest.mark.parametrize("border", [-1, 0, 10, 55, 99, 200])
def test_the_border_is_found_with_few_plans(border: int) -> None:
    asked: list[int] = []

    def captured(length: int) -> Graph:
        asked.append(length)
        return step_of(length)

    found = longest_fit(
        captured,
        [*range(100), 50, 3],
        PlanRequest(LEAST + border, planner="greedy", limits=Limits(seconds=1.0)),
        SILENT,
    )
    fitting = [length for length in range(100) if length <= border]
    assert found.longest == max(fitting, default=None)
    assert len(asked) == len(set(asked)) <= 8
    assert (found.minimum_bytes is None) == (border >= 99)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def load_step(model, options, progress):
        return step_of(options.sequence)

    monkeypatch.setattr(lengths, "load_step", load_step)
    return tmp_path / "lengths.txt"


def run(file: Path, capsys: pytest.CaptureFixture[str], code: int, *words: str) -> dict:
    budget = f"{LEAST + 40}B"
    asked = ("check", "zoo:gpt2", "--budget", budget, "--lengths", str(file), *words)
    assert main([*asked, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_samples_make_batches_in_their_order(file: Path, capsys) -> None:
    file.write_text("10\n41  # the longest\n\n3\n40\n41\n", "utf-8")
    found = run(file, capsys, 3, "--batch", "2")
    assert found["batches"] == 3 and found["longest"] == 40
    assert [(b["index"], b["length"]) for b in found["too_long"]] == [(0, 41), (2, 41)]
    assert main(["check", "zoo:gpt2", "--budget", f"{LEAST}B", "--lengths", str(file)]) == 3
    assert "5 do not, counted from 0: 0 (length 10), 1 (length 41)" in capsys.readouterr().out


def test_lengths_may_be_counted(file: Path, capsys) -> None:
    file.write_text("10 5\n20,7\n", "utf-8")
    assert run(file, capsys, 0)["batches"] == 12


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("10\nten\n", (), "line 2: 'ten' is no length"),
        ("# nothing\n", (), "has no lengths"),
        ("10\n20 3\n", (), "write all alike"),
        ("10\n", ("--sequence", "3"), "leave --sequence out"),
    ],
)
def test_bad_lengths_are_named(file: Path, text: str, words, message: str, capsys) -> None:
    file.write_text(text, "utf-8")
    assert message in run(file, capsys, 2, *words)["message"]
