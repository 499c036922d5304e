"""``tightfit simulate``: what it prints of a log, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.documents import example_of
from support.logs import linear_network
from tightfit.cli import main
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
