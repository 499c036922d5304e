"""``tightfit simulate``: what it prints of a log, and how it refuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from support.documents import example_of
from support.logs import call, linear_network
from tightfit.cli import main
from tightfit.eviction.log.instructions import Constant, Release
from tightfit.eviction.log.resolve import load_log
from tightfit.eviction.log.writer import write_log


@pytest.fixture
def log(tmp_path: Path) -> str:
    path = tmp_path / "chain.log.gz"
    write_log(path, linear_network(100))
    return str(path)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["simulate", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_log_is_replayed_in_a_budget(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = answer(capsys, log, "--policy", "h_dtr_eq", "--ratio", "0.3")
    assert (code, found["status"], found["budget_bytes"]) == (0, "ok", 30)
    assert found["base_peak_bytes"] == 100
    assert found["max_memory_bytes"] <= 30
    assert found["slowdown"] == found["total_cost_ns"] / found["base_cost_ns"] > 1
    assert found["rematerialisations"] == found["total_cost_ns"] - found["base_cost_ns"]
    assert found["evictions"] == found["evictions_pressure"] + found["evictions_eager"]
    assert main(["simulate", log, "--ratio", "0.3"]) == 0
    assert "it fits 30 B, 30.00 % of the peak" in capsys.readouterr().out


def test_no_policy_beats_the_plan_that_knows_the_program(
    log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, best = answer(capsys, log, "--policy", "clairvoyant", "--ratio", "0.3")
    assert (code, best["status"]) == (0, "ok")
    assert best["max_memory_bytes"] <= best["budget_bytes"] == 30
    for policy in ("improved", "improved_ancestors", "h_dtr", "h_dtr_eq", "msps"):
        _, found = answer(capsys, log, "--policy", policy, "--ratio", "0.3")
        assert best["bound"] <= best["slowdown"] <= found["slowdown"] + 1e-9
    code, none = answer(capsys, log, "--policy", "clairvoyant", "--budget", "2B")
    assert (code, none["status"], none["slowdown"]) == (3, "oom", None)


def test_an_arena_asks_for_holes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of x, y, z, w with 2, 1, 2, 1 KiB only x and z are free: 3 KiB fit, but not in one place."""
    kib = 1024
    program = [
        Constant("c", 0),
        *(
            call(name, "c", size=size * kib)
            for name, size in zip("xyzw", (2, 1, 2, 1), strict=True)
        ),
        Release("x"),
        Release("z"),
        call("v", "c", size=3 * kib),
    ]
    path = tmp_path / "holes.log"
    write_log(path, program)
    words = [str(path), "--budget", "6KiB", "--policy", "lru", "--thrash", "9"]
    _, as_bytes = answer(capsys, *words)
    _, in_arena = answer(capsys, *words, "--placement", "arena")
    assert (as_bytes["evictions_pressure"], as_bytes["status"]) == (0, "ok")
    assert in_arena["evictions_pressure"] > 0


def test_a_sweep_writes_the_figures(
    log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = answer(capsys, log, "--sweep", "-o", str(tmp_path))
    assert code == 0
    assert {row["figure"] for row in found["rows"]} == {2, 7, 8, 9, 10, 11, 12}
    for figure in (2, 7, 8, 9, 10, 11, 12):
        assert (tmp_path / f"figure{figure}.svg").read_bytes().startswith(b"<?xml")
    with (tmp_path / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found["rows"]) == 19 * (10 + 16 + 3 + 3)
    same = [
        (row["ratio"], row["slowdown"])
        for row in rows
        if row["line"] in ("lru", "cost=none,staleness")
    ]
    assert same[:19] == same[19:]


@pytest.mark.parametrize(("budget", "status"), [("2B", "oom"), ("4B", "thrash")])
def test_what_does_not_go_through_says_why(
    log: str, budget: str, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = answer(capsys, log, "--policy", "lru", "--budget", budget)
    assert (code, found["status"], found["slowdown"]) == (3, status, None)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--ratio", "0.5", "--policy", "best"], "choose among improved"),
        ([], "give either --ratio"),
        (["--ratio", "0.5", "--budget", "1MiB"], "give either --ratio"),
        (["--ratio", "-1"], "must be positive"),
        (["--ratio", "0.5", "--thrash", "0.5"], "must be 1 or more"),
        (["--sweep"], "give an existing folder"),
        (["--ratio", "0.5", "-o", "x"], "folder of a --sweep"),
    ],
)
def test_wrong_options_are_refused(
    log: str, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = answer(capsys, log, *words)
    assert code == 2
    assert why in found["message"]


def test_the_log_in_the_document_is_one(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(example_of("simulator.md"))
    log = load_log(path)
    assert [operator.name for operator in log.operators] == ["constant", "relu", "add_"]
    assert log.base_peak_bytes == 3 * 4096
