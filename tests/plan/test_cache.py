"""The plan cache gives back what it was given, verified, and survives damage."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from support.graphs import two_layers
from tightfit.errors import BadInput
from tightfit.graph import Graph, Variant
from tightfit.plan import Outcome, assemble, keep_everything, simulate
from tightfit.plan.cache import CachedPlan, PlanCache, PlanKey, plan_key
from tightfit.plan.shared import load_shared, save_shared
from tightfit.planners.base import Limits

GRAPH = two_layers()


def key_of(graph: Graph = GRAPH, budget_bytes: int = 5000, **changes: object) -> PlanKey:
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
    assert key_of(msgspec.structs.replace(GRAPH, name="other name")).digest == key_of().digest


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
        cache.store(PlanKey(digest=key), outcome_of())
        os.utime(tmp_path / f"{key}.json.gz", ns=(age, age))
    assert cache.load(PlanKey(digest="a"), GRAPH) is not None  # now the most recently used
    size = (tmp_path / "a.json.gz").stat().st_size
    PlanCache(tmp_path, largest_bytes=2 * size).store(PlanKey(digest="c"), outcome_of())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json.gz", "c.json.gz"]


def test_a_folder_that_cannot_be_written_to_only_warns(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.warns(UserWarning, match="the plan is not cached"):
        PlanCache(file / "folder").store(PlanKey(digest="a"), outcome_of())


def test_the_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path))
    assert PlanCache().folder == tmp_path / "plans"
    monkeypatch.delenv("TIGHTFIT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr("sys.platform", "linux")
    assert PlanCache().folder == tmp_path / "xdg" / "tightfit" / "plans"


def test_an_imported_plan_serves_where_nothing_was_planned(tmp_path: Path) -> None:
    there, file = PlanCache(tmp_path / "there"), tmp_path / "plans.json.gz"
    there.store(key_of(with_cost(GRAPH, 7.0)), outcome_of())
    save_shared(file, [kept.entry for kept in there.kept()])

    here = PlanCache(tmp_path / "here")
    assert here.take_in(load_shared(file).plans) == 1
    found = here.load(key_of(), GRAPH)  # other costs, so another key
    assert found is not None and found.plan == outcome_of().plan and found.note == "imported"
    assert here.load(key_of(budget_bytes=6000), GRAPH) is None  # made for much less
    assert here.load(key_of(budget_bytes=4999), GRAPH) is None  # made for more
    assert here.load(key_of(planner="other"), GRAPH) is None
    assert [kept.imported for kept in here.kept()] == [True]
    assert here.remove([kept.name for kept in here.kept()]) == 1 and not here.kept()


def test_an_imported_plan_that_does_not_fit_is_not_used(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    outcome = outcome_of()
    damaged = msgspec.structs.replace(outcome.plan, instructions=outcome.plan.instructions[:-1])
    entry = CachedPlan(outcome=msgspec.structs.replace(outcome, plan=damaged), key=key_of())
    cache.take_in([entry])
    assert cache.load(key_of(), GRAPH) is None


def test_a_file_of_plans_is_read_strictly(tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    for graph, message in (("0a", "does not belong to its graph"), ("../b", "no fingerprint")):
        key = PlanKey(digest="a", graph=graph, device="cpu")
        save_shared(file, [CachedPlan(outcome=outcome_of(), key=key)])
        with pytest.raises(BadInput, match=message):
            load_shared(file)
