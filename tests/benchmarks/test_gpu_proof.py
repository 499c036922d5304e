"""The logic of `make gpu-proof`, tried without a GPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def proof() -> Any:
    from benchmarks import gpu_proof

    return gpu_proof


def test_every_stage_reports_its_result(proof: Any) -> None:
    ran: list[Any] = []

    def run(command, longest_s):
        assert 0 < longest_s <= 150
        ran.append(command)
        if "benchmarks/gpu_proofs.py" in command:
            raise subprocess.TimeoutExpired(command, longest_s)
        return 1 if "pytest" in command else 0

    ended = dict(proof.run_all(proof.stages(), 600, run))
    assert ended["tests"] == "failed (exit code 1)"
    assert ended["proofs of gpt2"] == "stopped after 40 s"
    assert ended["training rows of resnet50"] == "held"
    assert ended["limit of unet"] == "held"
    assert len(ended) == len(ran) == 11
    assert set(dict(proof.run_all(proof.stages(), 0, run)).values()) == {"not run: no time left"}
    for stage in proof.stages():
        files = [word for word in stage.command if word.endswith(".py") or word == "tests/gpu"]
        assert files and all((ROOT / file).exists() for file in files)
    assert sum(stage.longest_s for stage in proof.stages()) < 700


def test_without_a_gpu_it_says_so(
    proof: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proof, "unusable_reason", lambda: "no driver")
    assert proof.main([]) == 2
    assert "gpu-proof needs a GPU: no driver. Nothing was run" in capsys.readouterr().out
    assert proof.main(["--dry-run"]) == 0
    assert capsys.readouterr().out.count("--device cuda") == 10


@pytest.mark.usefixtures("short_mobilenet")
def test_rows_of_proofs_become_lines(proof: Any, tmp_path: Path) -> None:
    from benchmarks import gpu_proofs, readme

    file = tmp_path / "rows.jsonl"
    words = "mobilenet_v2 --batch 4 --size 64 --ratios 0.7,0.01 --device cpu --output"
    assert gpu_proofs.main([*words.split(), str(file)]) == 1  # a hundredth cannot be held
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows[0]["bitwise"] and rows[0]["holds"] and "no plan" in rows[1]["error"]
    assert {"device", "torch", "commit", "date"} < rows[0].keys()
    section = readme.gpu_section({}, readme.newest_runs(rows))
    assert "MobileNetV2 (batch 4, size 64): 1 of 2 proofs held" in section
    assert "make gpu-proof" in readme.gpu_section({}, {})


@pytest.mark.usefixtures("short_mobilenet")
def test_a_model_within_a_limit_becomes_a_row_for_each_way(proof: Any, tmp_path: Path) -> None:
    """On a CPU, where nothing is reserved: what remains is that it runs and says so."""
    from benchmarks import gpu_limit

    file = tmp_path / "rows.jsonl"
    words = "mobilenet_v2 --ratio 0.8 --batch 2 --size 64 --device cpu --ways limit,warn --steps 2"
    assert gpu_limit.main([*words.split(), "--output", str(file)]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["way"] for row in rows] == ["plain", "limit", "warn"]
    assert all(row["enqueue_s"] <= row["step_s"] and row["commit"] for row in rows)
    assert rows[1]["planned_bytes"] <= rows[1]["budget_bytes"]
    assert len(gpu_limit.table(rows).splitlines()) == 4
    assert not gpu_limit.holds(rows[1] | {"retries": 1})
    assert not gpu_limit.holds(rows[1] | {"reserved_over": 1.2})
    assert "BudgetExceeded" in gpu_limit.table([rows[0] | {"error": "BudgetExceeded: no"}])


@pytest.mark.usefixtures("short_mobilenet")
def test_a_model_with_moves_and_without_becomes_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from benchmarks import offload_gpu

    file = tmp_path / "rows.jsonl"
    monkeypatch.setattr(offload_gpu, "MODELS", {"mobilenet_v2": {"batch": 2, "size": 64}})
    monkeypatch.setattr(offload_gpu, "FAR", "64MiB")
    monkeypatch.setattr(offload_gpu, "SEARCH_S", 1.0)
    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path))
    words = "--ratios 0.8 --device cpu --steps 1 --output"
    assert offload_gpu.main([*words.split(), str(file)]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["way"] for row in rows] == ["plain", "offload", "recompute"]
    assert all(row["peak_bytes"] <= row["budget_bytes"] for row in rows[1:])
    assert all(row["planned_stored_bytes"] == row["stored_bytes"] for row in rows[1:])
    assert len(offload_gpu.table(rows).splitlines()) == 4
    failed = {**rows[1], "error": "BudgetExceeded: no", "infeasible": False}
    assert not offload_gpu.holds(failed) and "BudgetExceeded" in offload_gpu.table([failed])
