"""Commands on models: captured on fake tensors, or trained and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tightfit
from tightfit.cli import main

FACTORY = """
import torch
from torch import nn

def small(batch=None):
    batch = batch or 4
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(16 * 256, 5),
    )
    images, classes = torch.randn(batch, 3, 16, 16), torch.randint(0, 5, (batch,))
    return model, nn.functional.cross_entropy, (images,), classes

def broken(batch=None):
    return undefined_name
"""
QUICK = ("--time-limit", "1")


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(FACTORY, "utf-8")
    return f"{path}:small"


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_check_tells_needs_and_costs(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("check", model, "--budget-ratio", "0.7", "--costs", "flops", *QUICK)
    code, found = answer(capsys, *words)
    assert code == 0
    assert found["constant_bytes"] < found["lower_bound_bytes"] <= found["minimum_budget_bytes"]
    assert found["minimum_budget_bytes"] <= found["planned_peak_bytes"] <= found["budget_bytes"]
    assert found["budget_bytes"] < found["eager_peak_bytes"]
    parameters = found["constants_bytes"]["parameters"]
    assert found["constants_bytes"]["optimizer_state"] == 2 * parameters
    assert main(list(words)) == 0
    text = capsys.readouterr().out
    for expected in ("optimizer state", "minimum ", "proven lower bound", "held at the peak"):
        assert expected in text


def test_optimizer_batch_and_device_count(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("minimum", model, "--costs", "unit", *QUICK)
    _, adamw = answer(capsys, *words)
    _, none = answer(capsys, *words, "--optimizer", "none")
    _, larger = answer(capsys, *words, "--optimizer", "none", "--batch", "8")
    _, other = answer(capsys, "minimum", model, "--costs", "a100", *QUICK)
    assert none["constant_bytes"] < larger["constant_bytes"] < adamw["constant_bytes"]
    assert larger["minimum_budget_bytes"] > none["minimum_budget_bytes"]
    assert other["constant_bytes"] % 512 == 0 and other["constant_bytes"] > adamw["constant_bytes"]


def test_check_within_the_minimum_and_below(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("check", model, "--costs", "unit", *QUICK)
    code, found = answer(capsys, *words, "--budget", "minimum")
    assert code == 0 and found["budget_bytes"] == found["minimum_budget_bytes"]
    code, below = answer(capsys, *words, "--budget", f"{found['lower_bound_bytes'] - 64}B")
    assert code == 3 and below["status"] == "infeasible" and below["proven"]
    assert below["minimum_budget_bytes"] == found["minimum_budget_bytes"]


def test_check_says_what_an_estimate_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    small = Path(__file__).parent.parent / "support" / "small.py"
    words = ("--budget", "1GiB", "--costs", "a100", *QUICK)
    assert main(["check", f"{small}:two_attentions", *words]) == 0
    text = capsys.readouterr().out
    assert "an estimate: operators are those of the CPU" in text
    assert "2 attentions are flash here and count as flash there" in text
    assert main(["check", f"{small}:two_with_dropout", *words]) == 0
    assert "2 attentions keep their [tokens, tokens] weights" in capsys.readouterr().out


def test_a_plan_of_a_model_is_verified_against_its_graph(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, plan = str(tmp_path / "graph.json"), str(tmp_path / "plan.json")
    asked = ("--budget-ratio", "0.8", "--costs", "flops", *QUICK)
    code, planned = answer(capsys, "plan", model, *asked, "-o", plan, "--graph-output", graph)
    assert code == 0
    code, verified = answer(capsys, "verify", plan, graph)
    assert code == 0 and verified["planned_peak_bytes"] == planned["planned_peak_bytes"]


def test_prove(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("prove", model, "--budget-ratio", "0.8", "--rounds", "1", "--threads", "1", *QUICK)
    code, proof = answer(capsys, *words)
    assert code == 0 and proof["status"] in ("optimal", "feasible")
    assert proof["bitwise"] and proof["max_relative_difference"] == 0
    assert proof["measured_peak_bytes"] <= proof["budget_bytes"] < proof["eager_peak_bytes"]
    assert len(proof["losses"]) == 3 and proof["time_ratio"] > 0
    assert main(list(words)) == 0
    assert "have the same bits in every step" in capsys.readouterr().out


def test_an_infeasible_proof_exits_3(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, failed = answer(capsys, "prove", model, "--budget-ratio", "0.01", *QUICK)
    assert code == 3 and failed["status"] == "infeasible"
    assert failed["minimum_budget_bytes"] > failed["budget_bytes"]


def test_a_proof_that_fails(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tightfit.studies.comparison.differing_parts", lambda *_: ("the loss",))
    monkeypatch.setattr("tightfit.studies.comparison.Comparison._tolerance", lambda _: None)
    words = ("prove", model, "--budget-ratio", "0.9", "--rounds", "0", *QUICK)
    code, proof = answer(capsys, *words)
    assert code == 1 and proof["status"] == "error" and not proof["bitwise"]
    assert main(list(words)) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("check", "graph.json", "--budget", "1GiB"), "for a graph file use tightfit plan"),
        (("check", "zoo:vit"), "give one budget: --budget 8GiB for all"),
        (("check", "mine.py"), "write mine.py:make, where make is the function that returns"),
        (("check", "zoo:vit", "--budget", "80%"), "is a percentage"),
        (("check", "zoo:vit", "--budget", "1GiB", "--size", "big"), "cannot read the size 'big'"),
        (("check", "zoo:vit", "--budget", "1GiB", "--costs", "abacus"), "'abacus' (known:"),
        (("check", "zoo:vit", "--budget", "1GiB", "--optimizer", "lion"), "lion"),
        (("check", "zoo:absent", "--budget", "1GiB"), "the zoo has no model 'absent'"),
        (("check", "{}:broken", "--budget", "1GiB"), "name 'undefined_name' is not defined"),
        (("prove", "{}:broken", "--budget", "1GiB"), "line 17: return undefined_name"),
        (("prove", "{}:absent", "--budget", "1GiB"), "has no 'absent' (it defines: small, broken)"),
        (("prove", "{}:small"), "give either a budget"),
        (("prove", "{}:small", "--budget", "1GiB", "--steps", "1"), "at least 2 steps"),
        (("prove", "{}:small", "--budget", "1GiB", "--threads", "0"), "threads must be at least 1"),
        (("minimum", "nothing"), "is no graph file: its name must end"),
        (("plan", "graph.json", "--budget", "1GiB", "--batch", "3"), "--batch can be set for"),
    ],
)
def test_bad_input_is_one_message(
    model: str, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = model.rpartition(":")[0]
    assert main([word.replace("{}", file) for word in words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.startswith("tightfit: ")
    assert "Traceback" not in captured.err and captured.out == ""


def test_python_gives_the_same_results_as_commands(model: str) -> None:
    options = {"optimizer": "sgd", "costs": "unit"}
    limits = tightfit.planners.base.Limits(seconds=1)
    least = tightfit.minimum_budget(model, limits=limits, **options)
    assert tightfit.check(model, budget=least.found_bytes, limits=limits, **options).fits
