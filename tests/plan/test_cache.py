"""The plan cache gives back what it was given, verified, and survives damage."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from support.graphs import two_layers
from tightfit.graph import Graph, Variant
from tightfit.plan import Outcome, assemble, keep_everything, simulate
from tightfit.plan.cache import PlanCache, plan_key
from tightfit.planners.base import Limits

GRAPH = two_layers()


def key_of(graph: Graph = GRAPH, budget_bytes: int = 5000, **changes: object) -> str:
    asked = {"gradients": "fresh", "planner": "greedy", "limits": Limits(), **changes}
    return plan_key(graph, budget_bytes=budget_bytes, **asked)


def outcome_of(budget_bytes: int = 5000) -> Outcome:
    plan = assemble(GRAPH, keep_everything(GRAPH), budget_bytes=budget_bytes)
    result = simulate(GRAPH, plan)
    return Outcome(
        plan=plan,
        overhead=result.overhead,
        bound=0.0,
        bound_source="trivial",
        status="optimal",
        seconds=0.5,
        peak_bytes=result.peak_bytes,
    )


def with_cost(graph: Graph, cost_s: float) -> Graph:
    op = graph.ops[0]
    alternative = msgspec.structs.replace(op.alternatives[0], variants=(Variant(cost_s=cost_s),))
    first = msgspec.structs.replace(op, alternatives=(alternative,))
    return msgspec.structs.replace(graph, ops=(first, *graph.ops[1:]))


def test_a_stored_outcome_comes_back(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path / "new" / "folder")
    assert cache.load(key_of(), GRAPH) is None
    cache.store(key_of(), outcome_of())
    assert cache.load(key_of(), GRAPH) == outcome_of()


def test_everything_that_decides_the_answer_is_in_the_key() -> None:
    keys = {
        key_of(),
        key_of(budget_bytes=5001),
        key_of(gradients="accumulated"),
        key_of(planner="other"),
        key_of(limits=Limits(seconds=1.0)),
        key_of(with_cost(GRAPH, 7.0)),
    }
    assert len(keys) == 6
    assert key_of(msgspec.structs.replace(GRAPH, name="other name")) == key_of()


@pytest.mark.parametrize("damage", ["cut", "text", "other budget"])
def test_a_damaged_entry_is_ignored_with_a_warning_and_rewritten(
    tmp_path: Path, damage: str
) -> None:
    cache = PlanCache(tmp_path)
    cache.store(key_of(), outcome_of(1000) if damage == "other budget" else outcome_of())
    path = next(tmp_path.iterdir())
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "text":
        path.write_text("not gzip")
    with pytest.warns(UserWarning, match="ignored and planned again"):
        assert cache.load(key_of(), GRAPH) is None
    cache.store(key_of(), outcome_of())
    assert cache.load(key_of(), GRAPH) == outcome_of()


def test_the_least_recently_used_entries_go(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    for age, key in enumerate(["a", "b", "c"]):
        cache.store(key, outcome_of())
        os.utime(tmp_path / f"{key}.json.gz", ns=(age, age))
    assert cache.load("a", GRAPH) is not None  # now the most recently used
    size = (tmp_path / "a.json.gz").stat().st_size
    PlanCache(tmp_path, largest_bytes=2 * size).store("c", outcome_of())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json.gz", "c.json.gz"]


def test_a_folder_that_cannot_be_written_to_only_warns(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.warns(UserWarning, match="the plan is not cached"):
        PlanCache(file / "folder").store("a", outcome_of())


def test_the_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path))
    assert PlanCache().folder == tmp_path / "plans"
    monkeypatch.delenv("TIGHTFIT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr("sys.platform", "linux")
    assert PlanCache().folder == tmp_path / "xdg" / "tightfit" / "plans"
