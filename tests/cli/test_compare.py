"""The comparison of planners: rows, files, and planners that refuse."""

from __future__ import annotations

import csv
import json
import threading
import xml.etree.ElementTree
from pathlib import Path

import pytest

from support.papers import chain
from support.searches import InterruptedAt
from tightfit.cli import main
from tightfit.cli.app import app
from tightfit.graph.io import save_graph
from tightfit.planners.base import Limits, Task
from tightfit.planners.questions.compare import compare

PLANNERS = ("greedy", "linearised_greedy", "checkmate", "gist")


@pytest.fixture
def graph(tmp_path: Path) -> str:
    path = tmp_path / "chain.json"
    save_graph(chain([2, 4, 1]), path)
    return str(path)


def test_rows_are_printed_and_written_as_csv_json_and_svg(
    graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", graph, "--budgets", "0.9,1", "--planners", ",".join(PLANNERS)]
    for suffix in ("csv", "json", "svg"):
        assert main([*words, "-o", str(tmp_path / f"out.{suffix}")]) == 0
    table = capsys.readouterr().out
    assert "checkmate" in table and "16.67 %" in table
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [(row["planner"], row["status"]) for row in rows[:4]] == [
        ("greedy", rows[0]["status"]),
        ("linearised_greedy", rows[1]["status"]),
        ("checkmate", "optimal"),
        ("gist", "unknown"),
    ]
    with (tmp_path / "out.csv").open() as file:
        assert [row["planner"] for row in csv.DictReader(file)] == [*PLANNERS, *PLANNERS]
    plot = xml.etree.ElementTree.parse(tmp_path / "out.svg").getroot()
    assert {text.text for text in plot.iter("{http://www.w3.org/2000/svg}text")} >= {"checkmate"}


@pytest.mark.parametrize("more", [(), ("--costs", "unit")])
def test_no_state_of_an_optimizer_is_assumed(more: tuple[str, ...]) -> None:
    _, bound, _ = app.parse_args(["compare", "zoo:vit", "--budgets", "1", *more])
    bound.apply_defaults()
    assert bound.arguments["options"].optimizer == "none"


def test_rows_in_a_folder_are_not_computed_again(
    graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", graph, "--budgets", "0.9", "--planners", "greedy,checkmate", "--json"]
    outputs: list[str] = []
    for _ in range(2):
        assert main([*words, "--results", str(tmp_path / "rows")]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def test_a_planner_for_chains_gives_a_row_that_says_why_it_refuses() -> None:
    skipping = chain([2, 4, 1])
    op = skipping.ops[2]
    way = op.alternatives[0]
    reads = type(way)(reads=(0, 1), writes=way.writes, variants=way.variants)
    ops = list(skipping.ops)
    ops[2] = type(op)(id=2, target=op.target, alternatives=(reads,), segment=0)
    graph = type(skipping)(values=skipping.values, ops=tuple(ops), segments=skipping.segments)
    rows = compare([Task(graph=graph, budget_bytes=10)], ["griewank", "greedy"], Limits(seconds=5))
    assert rows[0].status == "refused" and "chains only" in rows[0].note
    assert rows[1].planner == "greedy" and rows[1].status in ("optimal", "feasible", "unknown")


def test_an_interruption_keeps_the_rows_that_are_there() -> None:
    task = Task(graph=chain([2, 4, 1]), budget_bytes=9)
    jobs = ["gist", *["checkmate"] * 5]
    before = set(threading.enumerate())
    rows = compare([task], jobs, Limits(seconds=5, workers=1), InterruptedAt(1))
    assert 1 <= len(rows) <= len(jobs)
    assert len(set(threading.enumerate()) - before) < len(jobs)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budgets", "0.5", "--planners", "nobody"], "no planner is called 'nobody'"),
        (["--budgets", "8g"], "unknown unit"),
        (["--budgets", "0.5", "-o", "out.gif"], "must end in .csv, .json, .svg, .png or .pdf"),
        (["--budgets", "0.5", "--time-limit", "0"], "positive number of seconds"),
        (["--budgets", "0.5", "--scheduler", "local:2"], "--scheduler needs --results"),
        (["--budgets", "half"], "cannot read the budget 'half'"),
        (["--budgets", "0.5", "--alternatives", "all"], "can be set for models only"),
    ],
)
def test_bad_options_are_refused_by_name(
    graph: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--planners" not in words:
        words = [*words, "--planners", "gist"]
    assert main(["compare", graph, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_model_of_the_zoo_is_compared_without_its_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--batch", "176", "--size", "224", "--costs", "p100", "--json"]
    chosen = ["--budgets", "0.7", "--planners", "chen_greedy,ap_sqrt"]
    assert main(["compare", "zoo:vgg16", *words, *chosen]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["overhead"] < 0.1
    assert rows[0]["peak_bytes"] <= rows[0]["budget_bytes"]
    assert rows[1]["status"] == "unknown"
    assert main(["compare", "zoo:vgg16", *chosen, "--size", "wide"]) == 2
    assert "cannot read the size 'wide'" in capsys.readouterr().err


@pytest.mark.usefixtures("short_mobilenet")
def test_groups_of_alternatives_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--batch", "8", "--size", "64", "--costs", "p100", "--planners", "greedy,anytime"]
    groups = ["--budgets", "0.9", "--iterations", "20", "--alternatives", "none,output"]
    assert main(["compare", "zoo:mobilenet_v1", *words, *groups, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    named = {row["planner"]: row["overhead"] for row in rows}
    assert list(named) == ["greedy, none", "anytime, none", "greedy, output", "anytime, output"]
    assert named["anytime, output"] <= named["anytime, none"]
    assert main(["compare", "zoo:mobilenet_v1", *words, *groups[:-1], "some"]) == 2
    assert "no alternatives are called 'some'" in capsys.readouterr().err


BLOCKS = """
import torch
from torch import nn


def factory():
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)]
    loss = lambda output, target: output.square().mean()
    return nn.Sequential(*blocks), loss, (torch.randn(256, 32),), None
"""


def test_pytorchs_own_ways_are_shown_with_the_planners(
    graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "blocks.py").write_text(BLOCKS)
    words = ["compare", f"{tmp_path}/blocks.py:factory", "--costs", "flops"]
    ways = "pytorch.min_cut,pytorch.activation_memory_budget,pytorch.checkpoint"
    chosen = ["--budgets", "0.7,1", "--planners", f"greedy,{ways}", "--json"]
    assert main([*words, *chosen]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["planner"] for row in rows] == ["greedy", *ways.split(",")] * 2
    greedy, min_cut, share, checkpoint = rows[:4]
    assert min_cut["overhead"] is None and "activation_memory_budget=1" in min_cut["note"]
    for row in (share, checkpoint):
        assert row["overhead"] >= greedy["overhead"] - 1e-6
        assert row["peak_bytes"] <= row["budget_bytes"]
    assert rows[5]["overhead"] == 0 and rows[5]["peak_bytes"] <= rows[5]["budget_bytes"]
    assert main(["compare", graph, "--budgets", "1", "--planners", "pytorch.min_cut"]) == 2
    assert "need a model to ask PyTorch about" in capsys.readouterr().err
    assert main([*words, "--budgets", "1", "--planners", "pytorch.magic"]) == 2
    assert "pytorch.checkpoint" in capsys.readouterr().err
