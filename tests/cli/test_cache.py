"""Plans on disk are listed, given to others, taken in and deleted by commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.graphs import two_layers
from tightfit.cli import main
from tightfit.graph import Graph
from tightfit.plan import Outcome, assemble, keep_everything, simulate
from tightfit.plan.cache import PlanCache, plan_key
from tightfit.planners.base import Limits

GRAPH = two_layers()


def outcome_for(graph: Graph) -> Outcome:
    plan = assemble(graph, keep_everything(graph), budget_bytes=5000)
    peak_bytes = simulate(graph, plan).peak_bytes
    found = {"overhead": 0.0, "bound": 0.0, "bound_source": "trivial", "status": "optimal"}
    return Outcome(plan=plan, seconds=0.5, peak_bytes=peak_bytes, **found)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["cache", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_an_exported_plan_is_imported_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plans.json.gz"
    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path / "mine"))
    key = plan_key(GRAPH, budget_bytes=5000, gradients="fresh", planner="anytime", limits=Limits())
    PlanCache().store(key, outcome_for(GRAPH))
    (mine,) = answer(capsys, "ls")["plans"]
    assert mine["model"] == GRAPH.name and mine["budget_bytes"] == 5000 and not mine["imported"]
    assert answer(capsys, "export", str(file), mine["plan"][:6])["exported"] == 1

    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path / "yours"))
    assert answer(capsys, "import", str(file))["imported"] == 1
    assert main(["cache", "ls"]) == 0
    assert "imported" in capsys.readouterr().out
    (yours,) = answer(capsys, "ls")["plans"]
    assert yours["imported"]
    assert answer(capsys, "rm", "--all")["removed"] == 1
    assert not answer(capsys, "ls")["plans"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rm",), "or give --all"),
        (("rm", "nothing"), "no plan is called 'nothing'"),
        (("export", "plans.txt"), "must end in .json or .json.gz"),
        (("export", "plans.json"), "there is no plan to export"),
        (("import", "absent.json"), "cannot read absent.json"),
    ],
)
def test_bad_input_is_one_message(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["cache", *words]) == 2
    assert message in capsys.readouterr().err
