"""The study's graphs, where they are at hand: known optima and proofs of infeasibility."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tightfit.planners.base import Limits, Task
from tightfit.planners.questions.minimum import minimum_budget
from tightfit.planners.registry import plan_with

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [parent / "shared/data/graphs" for parent in (ROOT.parent, ROOT.parent.parent)]
FOLDER = next((folder for folder in FOLDERS if folder.exists()), FOLDERS[0])

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="the study's graphs are not at hand")


def reader() -> ModuleType:
    path = ROOT / "benchmarks/graph_files.py"
    spec = importlib.util.spec_from_file_location("graph_files", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "ratio", "percent"),
    [
        ("vgg16", 0.6, 0.87),
        ("vgg16", 0.8, 0.42),
        ("unet", 0.5, 2.36),
        ("resnet50", 0.6, 4.38),
        ("gpt2_12", 0.4, 13.13),
    ],
)
def test_known_optima_are_proved(name: str, ratio: float, percent: float) -> None:
    file = reader().read_graph_file(FOLDER / f"{name}.json.gz")
    task = Task(graph=file.graph, budget_bytes=int(ratio * file.peak_bytes))
    outcome = plan_with("anytime", task, Limits(iterations=400))
    assert outcome.status == "optimal"
    assert 100 * outcome.overhead == pytest.approx(percent, abs=0.015)


@pytest.mark.parametrize(("name", "ratio"), [("vgg16", 0.5), ("unet", 0.22), ("gpt2_12", 0.3)])
def test_impossible_budgets_are_proved(name: str, ratio: float) -> None:
    file = reader().read_graph_file(FOLDER / f"{name}.json.gz")
    task = Task(graph=file.graph, budget_bytes=int(ratio * file.peak_bytes))
    assert plan_with("anytime", task, Limits(seconds=10)).status == "infeasible"


def test_the_least_budget_is_bracketed_closely() -> None:
    file = reader().read_graph_file(FOLDER / "resnet50.json.gz")
    least = minimum_budget(file.graph, limits=Limits(seconds=5))
    assert least.lower_bytes / file.peak_bytes > 0.149
    assert least.found_bytes / file.peak_bytes < 0.17
